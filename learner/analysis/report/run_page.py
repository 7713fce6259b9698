"""`report.html` of a run folder, on request and when training ends."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from learner.analysis.report.answers import (
    MOST_STEPS,
    ReadAnswers,
    drop_chart,
    drop_meanings,
    drop_rows,
    fault_rows,
    finish_rows,
    guard_chart,
    histograms,
    read_answers,
)
from learner.analysis.report.charts import (
    curves,
    phase_rows,
    present,
    push_charts,
    push_meanings,
    server_rows,
    step_chart,
)
from learner.analysis.report.findings import findings
from learner.analysis.report.gallery import Gallery
from learner.analysis.report.page import asset, publish_page
from learner.analysis.report.run_view import (
    REPORT,
    RunView,
    evaluations_of,
    facts,
    headline,
    how_to_evaluate,
    state,
    tiles,
)
from learner.runs.console import tell
from learner.runs.run_folder import RESOLVED, RUN, RunFolder


def write_report(
    folder: RunFolder,
    out: Path | None = None,
    error: str | None = None,
    most_steps: int = MOST_STEPS,
) -> Path:
    """Write the page, by default into the folder; returns where it is.

    error: what ended the run, where that is known. most_steps: whose answers are read.

    Raises:
        ContractError: a log cannot be read.
    """
    out = out or folder.path / REPORT
    run = RunView.of(folder, error)
    answers = read_answers(folder, most_steps)
    resolution = run.config.rollout_matching.matching.maskiou_resolution
    gallery = Gallery(answers.chosen, answers.tally.answers, resolution, run.replay).data()
    values = {**_values(run, answers, gallery), **_evaluated(run, out)}
    scripts = [asset("theme.js"), asset("gallery.js"), plotly(), asset("charts.js")]
    publish_page(out, "report.html", scripts, values)
    return out


def plotly() -> str:
    """The library that draws the charts, whole, with its licence."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


def _values(run: RunView, answers: ReadAnswers, gallery: Mapping[str, Any]) -> dict[str, Any]:
    meanings = drop_meanings()
    unreadable = sum(bool(picture["problem"]) for picture in gallery["pictures"])
    steps, pushes, drawn = step_chart(run), push_charts(run), curves(run)
    drops, guard = drop_chart(run, meanings), guard_chart(run)
    lengths = histograms(answers.tally)
    charts = [*drawn, *present(steps, *pushes, drops, guard), *lengths]
    return {
        "title": run.config.training.run_name,
        "state": state(run),
        "finished": run.ended is not None and run.error is None,
        "facts": facts(run),
        "findings": findings(run, answers.tally, unreadable),
        "curves": drawn,
        "step_chart": steps,
        "phases": phase_rows(run),
        "pushes": pushes,
        "push_meanings": push_meanings(pushes),
        "servers": server_rows(run),
        "drops": drops,
        "drop_rows": drop_rows(run, meanings),
        "guard": guard,
        "guard_active": run.config.rollout_matching.repeat_terminate.enabled,
        "finishes": finish_rows(answers.tally),
        "faults": fault_rows(answers.tally),
        "histograms": lengths,
        "answers": answers,
        "asked": "B" in run.channels,
        "gallery": gallery,
        "figures": {each.slug: each.figure for each in charts},
        "config": _text(run, RESOLVED),
        "run_json": _text(run, RUN),
    }


def _evaluated(run: RunView, out: Path) -> dict[str, Any]:
    """What the page `out` has of the run's evaluations."""
    found = evaluations_of(run)
    first = headline(found, run.config.data.val_jsonl)
    link = first.link(out) if first else ""
    return {
        "tiles": tiles(run, first, link or "#evaluations"),
        "evaluations": [(each, each.link(out)) for each in reversed(found)],
        "headline": first,
        "how_to_evaluate": how_to_evaluate(run),
    }


def _text(run: RunView, name: str) -> str:
    return (run.folder.path / name).read_text(encoding="utf-8")


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


def renew(folder: Path, console: Console) -> None:
    """Write the report of a finished run again, which has a new evaluation.

    Of a run that goes on or was ended by an error, the command that writes it is named.
    """
    if RunView.of(RunFolder.open(folder)).ended is not None:
        _write(folder, console, None)
    else:
        tell(console, f"The page of the run has it after: learner report {folder}")


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
