"""`learner replay`: build a logged step again (REPLAY-01)."""

from pathlib import Path
from typing import Annotated

import typer


def replay(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    step: Annotated[int, typer.Option(help="Step of channel B, counted from 0.")],
) -> None:
    """Build a step again from its logged answers, and say whether it is identical."""
    raise NotImplementedError((run, step))
