"""`learner watch`: a run that goes on, in the terminal."""

from pathlib import Path
from typing import Annotated

import typer

_INTERRUPTED = 130


def watch(
    run: Annotated[Path, typer.Argument(help="Run folder: training.output_dir of a run.")],
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Stay when the run has ended, for one that goes on.")
    ] = False,
) -> None:
    """Watch a run from another terminal, by its files alone; ends with the run."""
    try:
        from learner.run_folder import RunFolder
        from learner.watch import watch_run

        watch_run(RunFolder.open(run), once, follow)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
