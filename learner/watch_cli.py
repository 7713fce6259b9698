"""`learner watch`: a run that goes on, in the terminal."""

from pathlib import Path
from typing import Annotated

import typer


def watch(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Watch a run from another terminal."""
    raise NotImplementedError(run)
