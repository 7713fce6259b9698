"""`learner report`: the page that shows a run (REPORT-01)."""

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Write report.html of a run."""
    raise NotImplementedError(run)
