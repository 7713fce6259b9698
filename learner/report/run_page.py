"""`report.html` of a run folder."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learner.report.answer_charts import (
    drop_chart,
    drop_meanings,
    drop_rows,
    fault_rows,
    finish_rows,
    guard_chart,
    histograms,
)
from learner.report.charts import Chart, present
from learner.report.curves import curves
from learner.report.findings import findings
from learner.report.gallery import Gallery
from learner.report.head import facts, state, tiles
from learner.report.page import asset, publish_page
from learner.report.run_view import RunView
from learner.report.tally import MOST_STEPS, ReadAnswers, read_answers
from learner.report.timeline import phase_rows, push_charts, push_meanings, server_rows, step_chart
from learner.resume import RESOLVED, RUN
from learner.run_folder import RunFolder

REPORT = "report.html"


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
    values = _values(run, answers, gallery)
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
    return {
        "title": run.config.training.run_name,
        "state": state(run),
        "finished": run.ended is not None and run.error is None,
        "tiles": tiles(run),
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
        "charts": charts_data([*drawn, *present(steps, *pushes, drops, guard), *lengths]),
        "config": _text(run, RESOLVED),
        "run_json": _text(run, RUN),
    }


def charts_data(charts: list[Chart]) -> dict[str, Any]:
    """For the page's script, by the name of the chart; tables are in the page already."""
    return {chart.slug: {**asdict(chart), "table": []} for chart in charts}


def _text(run: RunView, name: str) -> str:
    return (run.folder.path / name).read_text(encoding="utf-8")
