"""The report of a run, written when its training ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from learner.console import tell
from learner.report.run_page import write_report
from learner.report.tally import MOST_STEPS
from learner.run_folder import RunFolder

# Where an error ends several processes, each has seconds left: answers of so many steps are read.
_FEW = 100


@contextmanager
def reported(folder: Path, console: Console) -> Iterator[None]:
    """Write report.html when the block is over, also when an error ended it.

    A report that cannot be written is told in one line; it ends no run and hides no error.
    """
    try:
        yield
    except Exception as error:
        _write(folder, console, told(error))
        raise
    _write(folder, console, None)


def told(error: Exception) -> str:
    """The first line of what it says."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _write(folder: Path, console: Console, error: str | None) -> None:
    try:
        run = RunFolder.open(folder)
        if not run.metrics():
            return
        out = write_report(run, error=error, most_steps=MOST_STEPS if error is None else _FEW)
    except Exception as problem:  # noqa: BLE001  # a run does not end because of its report
        line = f"Warning: no report.html: {told(problem)}; try learner report {folder}"
    else:
        line = f"Report: {out}"
    tell(console, line)
