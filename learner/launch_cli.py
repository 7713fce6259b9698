"""`learner launch`: servers and learner of one node, started and stopped together (DEP-02)."""

from pathlib import Path
from typing import Annotated

import typer


def launch(
    config: Annotated[Path, typer.Option(help="Training YAML.")],
) -> None:
    """Start the rollout servers and the learner of a run, and stop them together."""
    raise NotImplementedError(config)
