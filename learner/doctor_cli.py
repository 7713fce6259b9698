"""`learner doctor`: what holds of a set-up before GPUs are paid for (DEP-03)."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    config: Annotated[Path, typer.Option(help="Training YAML.")],
) -> None:
    """Check a set-up: versions, ports, images, memory, a push and a rollout."""
    raise NotImplementedError(config)
