"""`learner report`: the page that shows a run (REPORT-01)."""

from pathlib import Path
from typing import Annotated

import typer

from shared_contracts.errors import ContractError


def report(
    run: Annotated[Path, typer.Argument(help="Run folder: training.output_dir of a run.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file. (report.html in the run folder)")
    ] = None,
) -> None:
    """Write report.html of a run, also of one that is still going on: one file, no network."""
    from learner.report import write_report
    from learner.report.run_page import REPORT
    from learner.run_folder import RunFolder

    folder = RunFolder.open(run)
    file = out or run / REPORT
    _require_page(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_report(folder, file)
    typer.echo(f"Report: {file} ({file.stat().st_size / 1e6:.1f} MB)")


def _require_page(file: Path) -> None:
    """It can be made, or is a page that was made before."""
    from learner.publish import require_new_file

    if file.suffix != ".html":
        raise ContractError("--out", f"{file} does not end in .html", "Name an HTML file")
    if not file.is_file():
        require_new_file("--out", file)
