"""`learner config`: what a training YAML says, what is wrong with it, what may stand in it."""

from pathlib import Path
from typing import Annotated

import typer

config_app = typer.Typer(help="Look at a training YAML without running it.", no_args_is_help=True)


@config_app.command()
def check(config: Annotated[Path, typer.Option(help="Training YAML.")]) -> None:
    """Name everything that is wrong with a training YAML, at once."""
    from learner.config import load_config

    load_config(config)
    typer.echo(f"{config}: valid")
