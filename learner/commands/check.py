"""`learner doctor`: checks of a set-up before GPUs are paid for (DEP-03)."""

from typing import Annotated

import typer

from learner.commands.config import ConfigFile, ConfigOption, only_config
from learner.distributed.waiting import use_passive_wait
from shared_contracts.cli import RUN_FAILED


def doctor(
    file: ConfigFile = None,
    config: ConfigOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    push: Annotated[
        bool,
        typer.Option(
            "--push",
            help="After the checks, push the checkpoint to the servers and compare answers.",
        ),
    ] = False,
) -> None:
    """Check the real environment: files, versions, GPUs, memory, and every server.

    Each server answers a few requests. Nothing is changed without `--push`, which takes the
    servers over from any other learner.

    Exit code 1 if a check fails, 2 if the config is wrong.
    """
    from rich.console import Console

    from learner.config import load_config

    parsed = load_config(only_config(file, config))
    use_passive_wait()
    console = Console(stderr=True)
    with console.status("Looking at files and libraries", spinner="line") as status:
        from learner.data.show import print_tables
        from learner.operate.doctor.findings import as_json, failed, summary, table
        from learner.operate.doctor.run import examine

        findings = []
        for finding in examine(parsed, push=push):
            status.update(f"After {finding.check} {finding.about}")
            findings.append(finding)
    if json:
        typer.echo(as_json(findings))
    else:
        print_tables([table(findings)])
        typer.echo(summary(findings))
    if failed(findings):
        raise typer.Exit(RUN_FAILED)
