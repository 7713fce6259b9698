"""`learner eval`: score a checkpoint by its rollouts (EVAL-01)."""

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    config: Annotated[Path, typer.Option(help="Training YAML.")],
) -> None:
    """Score a checkpoint by its rollouts, and write what it answered."""
    raise NotImplementedError(config)
