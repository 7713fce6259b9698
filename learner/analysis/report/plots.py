"""The curves of a run: a plot for each group of declared metrics and unit.

A line of many steps keeps the lowest and the highest value of each stretch, so that no spike is
lost. A value that is not a finite number is a gap.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from learner.analysis.report.run_view import Point, RunView, points_of
from learner.runs.declared import EVALUATION, GROUPS, TRAINER, Metric

# Points of a line, at most about.
MOST_POINTS = 1200
_SMOOTH_FROM = 40
# An axis is logarithmic where values differ by such a factor.
_DECADES = 50
# Units of metrics that make no curve.
_NO_CURVE = ("0 or 1", "seed")
_TRAINING = tuple(
    Metric(key, "whole", unit, TRAINER[key])
    for key, unit in (("loss", "loss"), ("grad_norm", "norm"), ("learning_rate", "rate"))
)


@dataclass(frozen=True)
class Plot:
    """unit: of the vertical axis. lines: `{"name", "x", "y"}`, and `mean` where it has one."""

    group: str
    slug: str
    title: str
    unit: str
    lines: list[dict[str, Any]]
    log: bool


def plots(run: RunView) -> list[Plot]:
    """A plot for each group and unit with a value other than 0; of training, for each metric."""
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
    log = bool(known) and min(known) > 0 and max(known) > _DECADES * min(known)
    slug = "-".join(f"{group} {unit}".lower().replace("/", " ").split())
    return Plot(group, slug, title, unit, [_line(*each) for each in series.items()], log)


def _series(run: RunView, metric: Metric) -> Iterator[tuple[str, list[Point]]]:
    """Its points, by channel where both channels log it; none where all are 0."""
    if metric.key.startswith("eval/"):
        found = {metric.key: points_of(run.evaluations, metric.key)}
    else:
        by_channel = {c: points_of(own, metric.key) for c, own in run.by_channel.items()}
        both = all(by_channel.values()) and len(by_channel) > 1
        found = {
            f"{metric.key} ({c})" if both else metric.key: p for c, p in by_channel.items() if p
        }
    yield from ((name, points) for name, points in found.items() if any(v != 0 for _, v in points))


def _line(name: str, points: list[Point]) -> dict[str, Any]:
    line: dict[str, Any] = {"name": name, **_axes(thinned(points))}
    if len(points) >= _SMOOTH_FROM:
        line["mean"] = _axes(thinned(running_mean(points)))
    return line


def _axes(points: Sequence[Point]) -> dict[str, list[float | None]]:
    values = [None if value is None else float(f"{value:.5g}") for _, value in points]
    return {"x": [step for step, _ in points], "y": values}


def thinned(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about so many points: lowest, highest and a gap of each stretch, in order."""
    if len(points) <= most:
        return points
    kept: list[Point] = []
    length = math.ceil(2 * len(points) / most)
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        known = [(value, step) for step, value in stretch if value is not None]
        ends = {(step, value) for value, step in (min(known), max(known))} if known else set()
        gaps = [point for point in stretch if point[1] is None][:1]
        kept += sorted({*ends, *gaps}, key=lambda point: point[0])
    return kept


def running_mean(points: Sequence[Point]) -> list[Point]:
    """Mean of each point and those before it, over a fortieth of all, at least five."""
    values = np.array([math.nan if value is None else value for _, value in points])
    known, window = ~np.isnan(values), np.ones(max(5, len(points) // 40))
    sums = np.convolve(np.where(known, values, 0.0), window)[: len(values)]
    counts = np.convolve(known, window)[: len(values)]
    steps = (step for step, _ in points)
    return [
        (step, total / count if there else None)
        for step, there, total, count in zip(
            steps, known, sums.tolist(), counts.tolist(), strict=True
        )
    ]
