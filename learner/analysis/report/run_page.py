"""`report.html` of a run folder, by `learner report` and at the end of training.

A long line of a curve is reduced to the lowest and highest values of its intervals, which keeps
spikes. A value that is not finite is a gap.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from learner.analysis.report.answers import MOST_AFTER_ERROR, MOST_STEPS, findings, read_answers
from learner.analysis.report.gallery import gallery
from learner.analysis.report.page import Section, asset, link, publish_page
from learner.analysis.report.run_view import (
    REPORT,
    SCORE_NAMES,
    Point,
    RunEvaluation,
    RunView,
    evaluations_of,
    headline,
    points_of,
    state,
    tiles,
)
from learner.data.show import Table
from learner.runs.console import score, tell
from learner.runs.declared import EVALUATION, GROUPS, TRAINER, Metric
from learner.runs.run_folder import RESOLVED, RUN, RunFolder

# Approximate limit of points in a line.
MOST_POINTS = 1200
_SMOOTH_FROM = 40
# Smallest ratio of values for a logarithmic axis.
_LOG_RATIO = 50
# Units of metrics without a curve.
_NO_CURVE = ("0 or 1", "seed")
_TRAINING = tuple(
    Metric(key, "whole", unit, TRAINER[key])
    for key, unit in (("loss", "loss"), ("grad_norm", "norm"), ("learning_rate", "rate"))
)


def write_report(folder: RunFolder, out: Path | None = None, error: str | None = None) -> Path:
    """Write the page, by default into the folder; return its path.

    error: the error that ended the run, if known.

    Raises ContractError if a log cannot be read.
    """
    out = out or folder.path / REPORT
    run = RunView.of(folder, error)
    tally, answers = read_answers(folder, MOST_STEPS if error is None else MOST_AFTER_ERROR)
    resolution = run.config.rollout_matching.matching.maskiou_resolution
    shown = gallery(answers, tally.answers, resolution, run.replay)
    unreadable = sum(bool(picture["problem"]) for picture in shown["pictures"])
    evaluations, curves = evaluations_of(run), plots(run)
    newest = headline(evaluations, run.config.data.val_jsonl)
    link_of_tile = (newest.link(out) if newest else "") or "#evaluations"
    known = {
        "model": run.config.model.model,
        "data": run.config.data.train_jsonl,
        "rollouts": run.facts.get("rollouts"),
        "commit": run.facts.get("commit"),
    }
    values = {
        "title": run.config.training.run_name,
        "state": state(run),
        "finished": run.ended is not None and run.error is None,
        "tiles": tiles(run, newest, link_of_tile),
        "findings": findings(run, tally, unreadable),
        "facts": {name: str(value) for name, value in known.items() if value},
        "sections": [_evaluations(run, evaluations, newest, out), _curves(curves)],
        "plots": {plot.slug: asdict(plot) for plot in curves},
        "gallery": shown,
        "texts": {
            name: (run.folder.path / name).read_text(encoding="utf-8") for name in (RESOLVED, RUN)
        },
    }
    publish_page(out, [asset("gallery.js"), plotly(), asset("charts.js")], values)
    return out


def plotly() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


def _evaluations(
    run: RunView, evaluations: Sequence[RunEvaluation], newest: RunEvaluation | None, out: Path
) -> Section:
    rows = []
    for each in reversed(evaluations):
        scores = [score(each.scores[name]) for name in SCORE_NAMES]
        data = each.data.name + ("" if each.held_out else " (trained on)")
        url = each.link(out)
        page = link("answers and tables", url) if url else "not kept"
        rows.append([f"{each.step:,}", *scores, data, page])
    columns = ["#step", *(f"#{name}" for name in SCORE_NAMES), "data", "page"]
    tables = [Table("Newest first", columns, rows)] if rows else []
    lead = (
        "A hit has an IoU of at least 0.5 and the right description. A run keeps the pages of its "
        "evaluations with `rollout_matching.eval_detection.save_answers`."
    )
    if newest is None:
        config = shlex.quote(str(run.folder.path.absolute() / RESOLVED))
        lead = (
            "This run has no evaluation on held-out data. Its match rate is of images that it "
            "trains on. A run evaluates itself with `data.val_jsonl`, `training.eval_strategy` "
            "and `training.eval_steps`. Evaluate a checkpoint with "
            f"`learner eval --config {config} --checkpoint CHECKPOINT --data FILE`"
        )
    return Section("evaluations", "Evaluations", lead, tables=tables)


@dataclass(frozen=True)
class Plot:
    """unit: of the vertical axis. lines: `{"name", "x", "y"}`, with `mean` for long lines."""

    group: str
    slug: str
    title: str
    unit: str
    lines: list[dict[str, Any]]
    log: bool


def plots(run: RunView) -> list[Plot]:
    """Return a plot for each training metric, and for each group and unit, unless all are 0."""
    drawn = [_plot(run, "Training", metric.unit, [metric]) for metric in _TRAINING]
    groups = sorted(GROUPS.items(), key=lambda group: group[1] is not EVALUATION)
    for title, metrics in groups:
        units = dict.fromkeys(metric.unit for metric in metrics)
        for unit in (unit for unit in units if unit not in _NO_CURVE):
            own = [metric for metric in metrics if metric.unit == unit]
            drawn.append(_plot(run, title, unit, own))
    return [plot for plot in drawn if plot.lines]


def _plot(run: RunView, group: str, unit: str, metrics: Sequence[Metric]) -> Plot:
    series = {name: points for metric in metrics for name, points in _series(run, metric)}
    keys = {name.partition(" ")[0] for name in series}
    title = keys.pop() if len(keys) == 1 else {"1": "share"}.get(unit, unit)
    known = [value for points in series.values() for _, value in points if value is not None]
    log = bool(known) and min(known) > 0 and max(known) > _LOG_RATIO * min(known)
    slug = "-".join(f"{group} {unit}".lower().replace("/", " ").split())
    return Plot(group, slug, title, unit, [_line(*each) for each in series.items()], log)


def _series(run: RunView, metric: Metric) -> Iterator[tuple[str, list[Point]]]:
    """Yield (name, points) of a metric, by channel if both log it; skips lines of zeros."""
    if metric.key.startswith("eval/"):
        lines = {metric.key: points_of(run.evaluations, metric.key)}
    else:
        by_channel = {c: points_of(own, metric.key) for c, own in run.by_channel.items()}
        both = all(by_channel.values()) and len(by_channel) > 1
        lines = {
            f"{metric.key} ({c})" if both else metric.key: p for c, p in by_channel.items() if p
        }
    yield from ((name, points) for name, points in lines.items() if any(v != 0 for _, v in points))


def _line(name: str, points: list[Point]) -> dict[str, Any]:
    line: dict[str, Any] = {"name": name, **_axes(thinned(points))}
    if len(points) >= _SMOOTH_FROM:
        line["mean"] = _axes(thinned(running_mean(points)))
    return line


def _axes(points: Sequence[Point]) -> dict[str, list[float | None]]:
    values = [None if value is None else float(f"{value:.5g}") for _, value in points]
    return {"x": [step for step, _ in points], "y": values}


def thinned(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return about `most` points at most: the lowest, the highest and a gap of each interval."""
    if len(points) <= most:
        return points
    kept: list[Point] = []
    length = math.ceil(2 * len(points) / most)
    for start in range(0, len(points), length):
        interval = points[start : start + length]
        known = [(value, step) for step, value in interval if value is not None]
        ends = {(step, value) for value, step in (min(known), max(known))} if known else set()
        gaps = [point for point in interval if point[1] is None][:1]
        kept += sorted({*ends, *gaps}, key=lambda point: point[0])
    return kept


def running_mean(points: Sequence[Point]) -> list[Point]:
    """Return trailing means; the window is a fortieth of all points, at least five."""
    values = np.array([math.nan if value is None else value for _, value in points])
    known, window = ~np.isnan(values), np.ones(max(5, len(points) // 40))
    sums = np.convolve(np.where(known, values, 0.0), window)[: len(values)]
    counts = np.convolve(known, window)[: len(values)]
    steps = (step for step, _ in points)
    return [
        (step, total / count if finite else None)
        for step, finite, total, count in zip(
            steps, known, sums.tolist(), counts.tolist(), strict=True
        )
    ]


def _curves(drawn: Sequence[Plot]) -> Section:
    groups: dict[str, list[tuple[str, str]]] = {}
    for plot in drawn:
        groups.setdefault(plot.group, []).append((plot.slug, plot.title))
    lead = (
        "Steps are counted from 1, as in metrics.jsonl and TensorBoard. Drag over a part to look "
        "closer, double-click to see all again, click a name to hide it. Of 40 steps or more, the "
        "strong line is the running mean. docs/metrics.md describes every metric."
    )
    return Section("curves", "Curves", lead if drawn else "No step is logged yet.", plots=groups)


@contextmanager
def reported(folder: Path, console: Console) -> Iterator[None]:
    """Write report.html at the end of the block, also after an error.

    A failure of the report is only a warning.
    """
    try:
        yield
    except Exception as error:
        write_or_warn(folder, console, error_text(error))
        raise
    write_or_warn(folder, console)


def renew(folder: Path, console: Console) -> None:
    """Rewrite the report of a finished run, after a new evaluation.

    For an unfinished or failed run, print the command that writes it.
    """
    if RunView.of(RunFolder.open(folder)).ended is not None:
        write_or_warn(folder, console)
    else:
        tell(console, f"To update the page of the run: learner report {folder}")


def error_text(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def write_or_warn(folder: Path, console: Console, error: str | None = None) -> None:
    try:
        run = RunFolder.open(folder)
        if not run.metrics():
            return
        out = write_report(run, error=error)
    except Exception as problem:  # noqa: BLE001  # a report must not end a run
        line = f"Warning: no report.html: {error_text(problem)}; try learner report {folder}"
    else:
        line = f"Report: {out}"
    tell(console, line)
