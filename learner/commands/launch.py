"""`learner launch`: servers and learner of one machine, started and stopped together (DEP-02)."""

from pathlib import Path
from typing import Annotated

import typer


def launch(
    config: Annotated[Path, typer.Option(help="Training YAML; all hyperparameters live there.")],
    server_gpus: Annotated[
        list[str] | None,
        typer.Option(help="GPUs of a server, as in 0,1,2; once for each server of the YAML."),
    ] = None,
    train_gpus: Annotated[
        str | None, typer.Option(help="GPUs of the learner, as in 3: one process for each.")
    ] = None,
    device: Annotated[str, typer.Option(help="gpu, or cpu for all.")] = "gpu",
    train_processes: Annotated[
        int | None, typer.Option(help="Learner processes on the CPU. (1)")
    ] = None,
    server_config: Annotated[
        Path | None,
        typer.Option(help="YAML of more settings of the servers; `rollout-server serve --help`."),
    ] = None,
) -> None:
    """Start the rollout servers and the learner of a run, and stop them together."""
    import os
    from functools import partial

    from rich.console import Console

    from learner.config import load_config, load_mapping
    from learner.console import tell
    from learner.operate.launch import crew_of
    from learner.operate.launch import launch as run
    from learner.operate.launch_plan import check_launch, plan_launch
    from learner.operate.split import Asked

    console = Console()
    say = partial(tell, console)
    parsed = load_config(config)
    own = load_mapping(server_config) if server_config is not None else {}
    asked = Asked(device, tuple(server_gpus or ()), train_gpus, train_processes)
    checked = check_launch(parsed, asked, own)
    if over := checked.inputs.finished(parsed.training):
        say(over)
        return
    plan = plan_launch(config, parsed, checked, os.environ)
    plan.write_files()
    for server in plan.servers:
        say(f"Starting a rollout server: {server} (log: {server.log})")
    try:
        code = run(crew_of(plan), say)
    finally:
        console.show_cursor()  # a learner that was stopped may have hidden it
    raise typer.Exit(code)
