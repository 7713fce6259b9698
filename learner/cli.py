"""The `learner` command. Parses and checks before it imports anything heavy."""

import os
from pathlib import Path
from typing import Annotated

import typer

from learner.commands.config import config_app
from learner.commands.data import data_app
from learner.commands.doctor import doctor
from learner.commands.evaluate import evaluate
from learner.commands.launch import launch
from learner.commands.replay import replay
from learner.commands.report import report
from learner.commands.simulate import simulate
from learner.commands.toy import toy_app
from learner.commands.watch import watch
from learner.cores import share_cores
from shared_contracts.cli import print_version, run_cli

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(toy_app, name="toy")
app.command()(launch)
app.command()(doctor)
app.command("eval")(evaluate)
app.command()(report)
app.command()(replay)
app.command()(watch)
app.command()(simulate)


@app.callback()
def learner(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Fine-tune a vision-language detector by rollout matching."""


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="Training YAML; all hyperparameters live there.")],
) -> None:
    """Train as a YAML file says."""
    from rich.console import Console

    from learner.config import load_config
    from learner.console import tell
    from learner.preflight import check_inputs, generates, reach_servers
    from learner.rollout.colocate import learner_environment
    from learner.rollout.describe import describe_backend

    console = Console()
    parsed = load_config(config)
    inputs = check_inputs(parsed)
    if over := inputs.finished(parsed.training):
        tell(console, over)
        return
    clients = []
    if generates(parsed):
        answering = describe_backend(parsed, inputs.placement)
        tell(console, f"Rollouts: {answering}")
        clients = reach_servers(parsed)

    share_cores()
    os.environ.update(learner_environment(inputs.placement))
    if inputs.processes > 1:  # a process that ends is told by name, not by its sockets
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from learner.publish import expect_full_disks_in_threads
    from learner.train import train as run

    expect_full_disks_in_threads()
    folder = run(parsed, inputs, clients, console)
    tell(console, f"Run folder: {folder}")


@app.command()
def preflight(
    config: Annotated[Path, typer.Option(help="Training YAML.")],
) -> None:
    """Print what a launcher needs to know of a training YAML, as shell assignments."""
    from learner.config import load_config
    from learner.launch_contract import shell_assignments

    typer.echo(shell_assignments(load_config(config)), nl=False)


@app.command()
def probe(
    config: Annotated[Path, typer.Option(help="Training YAML: the checkpoint and its servers.")],
) -> None:
    """Push the checkpoint to the servers and compare their answers with its own."""
    from rich.console import Console

    from learner.config import load_config
    from learner.preflight import check_checkpoint, reach_servers

    parsed = load_config(config)
    check_checkpoint(Path(parsed.model.model))
    share_cores()
    from learner.probe import probe_servers, require_servers, table

    require_servers(parsed)
    findings = probe_servers(parsed, reach_servers(parsed))
    Console().print(table(findings))
    if any(finding.difference is not None for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="New folder for the run.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.", min=0)] = 0,
) -> None:
    """Watch the whole loop on this machine: toy world, server, training, scores."""
    from rich.console import Console

    from learner.publish import require_free

    folder = out or _new_demo_folder()
    require_free(folder)

    share_cores()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the demo is for a CPU, whatever else is there
    from learner.demo import run_demo

    run_demo(folder.resolve(), seed, Console())


def _new_demo_folder() -> Path:
    from datetime import datetime

    return Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"


def main() -> None:
    """Console entry: a contract error is a three-part message and exit code 2."""
    run_cli(app)
