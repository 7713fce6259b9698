"""The curves of a run: a plot for each group and unit of declared metrics.

A long line is reduced to the lowest and highest values of its intervals, which keeps spikes. A
value that is not finite is a gap.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from learner.analysis.report.run_view import Point, RunView, points_of
from learner.runs.declared import EVALUATION, GROUPS, TRAINER, Metric

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
