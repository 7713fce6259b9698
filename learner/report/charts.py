"""What a chart is, and how long series are made short without a lie.

A curve of many steps keeps the lowest and the highest value of each stretch, so that no spike is
lost, and a gap where values were no numbers. Bars of many steps are means over stretches. Each
says so below the chart.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from learner.metrics.figures import number
from learner.report.run_view import Point, numbers

# Points of a curve, and bars of a chart, at most.
MOST_POINTS = 1200
MOST_BARS = 400
_SMOOTH_FROM = 40
_DIGITS = 5


@dataclass(frozen=True)
class Trace:
    """colour: 1 to 8. row: of the chart, from 1. hover: what is shown beside the value."""

    name: str
    x: list[float]
    y: list[float | None]
    colour: int
    kind: Literal["line", "faint", "points", "bar"] = "line"
    row: int = 1
    dash: str = "solid"
    hover: list[str] | None = None


@dataclass(frozen=True)
class Summary:
    """A series in a row of a table."""

    name: str
    count: int
    first: str
    last: str
    lowest: str
    highest: str


@dataclass(frozen=True)
class Chart:
    """rows: titles of the vertical axes, from the top. notes: what a reader has to know."""

    slug: str
    title: str
    rows: list[str]
    traces: list[Trace]
    notes: list[str] = field(default_factory=list)
    table: list[Summary] = field(default_factory=list)
    x_title: str = "step"
    log: bool = False
    shares: bool = False
    wide: bool = False
    whole: bool = False


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def curve(
    slug: str,
    title: str,
    y_title: str,
    series: dict[str, list[Point]],
    *,
    log: bool = False,
    shares: bool = False,
    smooth: bool = True,
) -> Chart | None:
    """A line for each series that has a point; None where none has.

    log: on a logarithmic axis. shares: from 0 to 1. smooth: with the mean of many points.
    """
    present = {name: points for name, points in series.items() if points}
    if not present:
        return None
    traces: list[Trace] = []
    for colour, (name, points) in enumerate(present.items()):
        traces += _lines(name, points, colour, smooth and len(points) >= _SMOOTH_FROM)
    notes = []
    if any(len(points) > MOST_POINTS for points in present.values()):
        notes.append(
            "Of so many steps, the lowest and the highest value of each stretch are drawn."
        )
    if any(trace.kind == "faint" for trace in traces):
        notes.append("Faint: each step. Strong: the running mean.")
    table = [summary(name, points) for name, points in present.items()]
    return Chart(slug, title, [y_title], traces, notes, table, log=log, shares=shares)


def _lines(name: str, points: list[Point], place: int, smooth: bool) -> list[Trace]:
    colour, dash = place % 8 + 1, "solid" if place < 8 else "dot"
    x, y = _axes(thinned(points))
    each = Trace(name, x, y, colour, "faint" if smooth else "line", dash=dash)
    if not smooth:
        return [each]
    x, y = _axes(thinned(running_mean(points)))
    return [each, Trace(name, x, y, colour, dash=dash)]


def _axes(points: Sequence[Point]) -> tuple[list[float], list[float | None]]:
    return [x for x, _ in points], [rounded(y) for _, y in points]


def summary(name: str, points: Sequence[Point]) -> Summary:
    known = list(numbers(points))
    return Summary(
        name,
        len(points),
        number(points[0][1]),
        number(points[-1][1]),
        number(min(known)) if known else "-",
        number(max(known)) if known else "-",
    )


def thinned(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about so many points: lowest, highest and a gap of each stretch, in order."""
    if len(points) <= most:
        return points
    kept: list[Point] = []
    for stretch in _stretches(points, math.ceil(2 * len(points) / most)):
        known = [point for point in stretch if point[1] is not None]
        gaps = [point for point in stretch if point[1] is None][:1]
        lowest = min(known, key=_value, default=None)
        highest = max(known, key=_value, default=None)
        ends = {point for point in (lowest, highest, *gaps) if point is not None}
        kept += sorted(ends, key=lambda point: point[0])
    return kept


def _value(point: Point) -> float:
    assert point[1] is not None
    return point[1]


def _stretches(points: list[Point], length: int) -> list[list[Point]]:
    return [points[start : start + length] for start in range(0, len(points), length)]


def running_mean(points: list[Point]) -> list[Point]:
    """Mean of each point and those before it, over a fortieth of all, at least five."""
    window = max(5, len(points) // 40)
    means: list[Point] = []
    total, count = 0.0, 0
    for place, (x, value) in enumerate(points):
        if value is not None:
            total, count = total + value, count + 1
        if place >= window and (old := points[place - window][1]) is not None:
            total, count = total - old, count - 1
        means.append((x, total / count if count and value is not None else None))
    return means


@dataclass(frozen=True)
class Bars:
    """Equal stretches of steps. middle: of each, on the axis. note: empty where each is a step."""

    places: list[range]
    middle: list[float]
    note: str

    @classmethod
    def over(cls, steps: Sequence[int]) -> "Bars":
        length = max(1, math.ceil(len(steps) / MOST_BARS))
        places = [
            range(start, min(start + length, len(steps))) for start in range(0, len(steps), length)
        ]
        middle = [(steps[each[0]] + steps[each[-1]]) / 2 for each in places]
        return cls(places, middle, f"Each bar is the mean of {length} steps." if length > 1 else "")

    def trace(self, name: str, values: Sequence[float | None], colour: int, row: int = 1) -> Trace:
        heights = [_mean([values[place] for place in each]) for each in self.places]
        return Trace(name, self.middle, [rounded(height) for height in heights], colour, "bar", row)


def _mean(values: Sequence[float | None]) -> float:
    """None counts as 0: a phase that a step does not have took no time."""
    return sum(value or 0.0 for value in values) / len(values)


def histogram(
    slug: str, title: str, x_title: str, counts: dict[int, int], colour: int, most: int = 40
) -> Chart | None:
    """How many answers have which number. counts: answers by that number."""
    if not counts:
        return None
    low, high = min(counts), max(counts)
    width = _bin_width((high - low + 1) / most)
    bins = range(low // width, high // width + 1)
    heights = dict.fromkeys(bins, 0)
    for value, count in counts.items():
        heights[value // width] += count
    hover = [
        str(each * width) if width == 1 else f"{each * width} to {(each + 1) * width - 1}"
        for each in bins
    ]
    middle: list[float] = [each * width + (width - 1) / 2 for each in bins]
    tall: list[float | None] = [float(height) for height in heights.values()]
    trace = Trace("answers", middle, tall, colour, "bar", hover=hover)
    table = [_spread(x_title, counts)]
    return Chart(slug, title, ["answers"], [trace], table=table, x_title=x_title, whole=True)


def _bin_width(least: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ...."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def _spread(name: str, counts: dict[int, int]) -> Summary:
    """Its quartiles stand where a curve has its first and last value."""
    quarter, three = (quantile(counts, share) for share in (0.25, 0.75))
    total = sum(counts.values())
    return Summary(
        name, total, number(quarter), number(three), number(min(counts)), number(max(counts))
    )


def quantile(counts: dict[int, int], share: float) -> int:
    """The least number that `share` of all do not exceed."""
    needed = share * sum(counts.values())
    reached = 0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= needed:
            return value
    raise ValueError("no counts")


def present(*charts: Callable[[], Chart | None] | Chart | None) -> list[Chart]:
    """The charts that have something to show."""
    made = (chart() if callable(chart) else chart for chart in charts)
    return [chart for chart in made if chart is not None]
