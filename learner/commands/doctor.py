"""`learner doctor`: what holds of a set-up before GPUs are paid for (DEP-03)."""

from pathlib import Path
from typing import Annotated

import typer

from learner.cores import share_cores
from shared_contracts.cli import RUN_FAILED


def doctor(
    config: Annotated[Path, typer.Option(help="Training YAML.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Check a set-up for real: files, versions, GPUs, memory, and every server.

    Servers answer a few requests, and compare one tensor and drop it; nothing is changed.

    Exit code 1 when a check fails, 2 when the config is wrong.
    """
    from rich.console import Console

    from learner.config import load_config

    parsed = load_config(config)
    share_cores()
    console = Console(stderr=True)
    with console.status("Looking at files and libraries", spinner="line") as status:
        from learner.doctor.run import examine
        from learner.doctor.show import as_json, failed, summary, tables

        findings = []
        for finding in examine(parsed):
            status.update(f"After {finding.check} {finding.about}")
            findings.append(finding)
    if json:
        typer.echo(as_json(findings))
    else:
        shown = Console()
        for table in tables(findings):
            shown.print(table)
        shown.print(summary(findings), highlight=False)
    if failed(findings):
        raise typer.Exit(RUN_FAILED)
