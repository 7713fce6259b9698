"""The charts of a run: curves of its metrics, the seconds of its steps and of its pushes.

A curve of many steps keeps the lowest and the highest value of each stretch, so that no spike is
lost, and a gap where values were no numbers. Bars of many steps are means over stretches. Each
says so below the chart. What is made beside training is drawn in a row of its own: in a step whose
rollouts overlap with learning, its seconds and those of learning are the same ones.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from learner.analysis.report.page import asset
from learner.analysis.report.run_view import Line, Point, RunView, keys_below, numbers, of_channel
from learner.analysis.report.run_view import points as points_of
from learner.runs.console import fraction, number
from learner.runs.declared import SYNC_PHASES

# Points of a curve, and bars of a chart, at most.
MOST_POINTS = 1200
MOST_BARS = 400
_SMOOTH_FROM = 40
# A trace or an axis of Plotly.
Part = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """A series in a row of a table; of a histogram, first and last are its quartiles."""

    name: str
    count: int
    first: str
    last: str
    lowest: str
    highest: str


@dataclass(frozen=True)
class Chart:
    """figure: of Plotly, with colours as CSS has them. notes: what a reader has to know."""

    slug: str
    title: str
    figure: dict[str, Any]
    notes: list[str]
    table: list[Summary]
    wide: bool = False

    @property
    def rows(self) -> int:
        """How many vertical axes there are, one below the other."""
        return sum(key.startswith("yaxis") for key in self.figure["layout"])


def _chart(
    slug: str,
    title: str,
    rows: Sequence[str],
    traces: list[Part],
    notes: Sequence[str] = (),
    table: Sequence[Summary] = (),
    *,
    x_axis: Part,
    y_axis: Part | None = None,
    wide: bool = False,
    **layout: Any,
) -> Chart:
    """rows: titles of the vertical axes, from the top. x_axis, y_axis, layout: as Plotly has them.

    What all charts have in common is in `look.json`.
    """
    height = (1.1 - 0.1 * len(rows)) / len(rows)
    for place, row in enumerate(rows):
        top = 1 - place * (height + 0.1)
        domain = [max(0.0, top - height), top]
        layout[f"yaxis{place + 1}"] = {"title": {"text": row}, "domain": domain, **(y_axis or {})}
    layout |= {
        "template": json.loads(asset("look.json")),
        "showlegend": len({trace["name"] for trace in traces}) > 1,
        "xaxis": {"anchor": f"y{len(rows)}", **x_axis},
    }
    options = {
        "responsive": True,
        "displaylogo": False,
        "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
        "toImageButtonOptions": {"filename": slug, "scale": 2},
    }
    figure = {"data": traces, "layout": layout, "config": options}
    return Chart(slug, title, figure, list(notes), list(table), wide)


def _trace(name: str, x: Sequence[float], y: Sequence[float | None], **more: Any) -> Part:
    rounded = [None if value is None else float(f"{value:.5g}") for value in y]
    common = {"name": name, "x": list(x), "y": rounded, "legendgroup": name}
    return common | {"hovertemplate": "%{y:.4~g}"} | more


def curve(
    slug: str,
    title: str,
    y_title: str,
    series: dict[str, list[Point]],
    *,
    log: bool = False,
    shares: bool = False,
    smooth: bool = True,
    from_zero: bool = True,
) -> Chart | None:
    """A line for each series that has a point; None where none has.

    log: on a logarithmic axis. shares: from 0 to 1. smooth: with the mean of many points.
    """
    present = {name: points for name, points in series.items() if points}
    if not present:
        return None
    traces: list[Part] = []
    for place, (name, points) in enumerate(present.items()):
        line = {"color": f"var(--line-{place % 8 + 1})", "dash": "solid" if place < 8 else "dot"}
        if smooth and len(points) >= _SMOOTH_FROM:
            faint = {"opacity": 0.3, "showlegend": False}
            traces += [
                _line(name, points, {**line, "width": 1}, **faint),
                _line(name, running_mean(points), {**line, "width": 2}, hoverinfo="skip"),
            ]
            del traces[-1]["hovertemplate"]  # which is stronger than `hoverinfo`
        else:
            traces.append(_line(name, points, {**line, "width": 2}))
    notes = []
    if any(len(points) > MOST_POINTS for points in present.values()):
        notes.append(
            "Of so many steps, the lowest and the highest value of each stretch are drawn."
        )
    if any("opacity" in trace for trace in traces):
        notes.append("Faint: each step. Strong: the running mean.")
    axis: Part = {} if from_zero else {"rangemode": "normal"}
    if log:
        axis = {"type": "log", "dtick": 1, "exponentformat": "power", "rangemode": "normal"}
    if shares:
        highest = max((y for each in traces for y in each["y"] if y is not None), default=0.0)
        axis |= {"tickformat": ".0%"} | ({"range": [0, 1.02]} if highest > 0.4 else {})
    table = [summary(name, points) for name, points in present.items()]
    step = {"title": {"text": "step"}}
    return _chart(slug, title, [y_title], traces, notes, table, x_axis=step, y_axis=axis)


def _line(name: str, points: list[Point], line: Part, **more: Any) -> Part:
    x, y = zip(*thinned(points), strict=True)
    limit = len(y) == 2 and y[0] == y[1]
    mode = "lines+markers" if len(x) < 25 and not limit else "lines"
    return _trace(name, x, y, line=line, mode=mode, marker={"size": 5}, **more)


def summary(name: str, points: Sequence[Point]) -> Summary:
    known = list(numbers(points))
    ends = (number(min(known)), number(max(known))) if known else ("-", "-")
    return Summary(name, len(points), number(points[0][1]), number(points[-1][1]), *ends)


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
    """The bars of one name. colour: 1 to 8. row: of the chart, from 1."""

    name: str
    colour: int
    values: Sequence[float | None]
    row: int = 1


def bar_chart(
    slug: str,
    title: str,
    rows: Sequence[str],
    steps: Sequence[int],
    series: Sequence[Bars],
    notes: Sequence[str] = (),
    *,
    x_title: Literal["step", "push"] = "step",
    hover: Sequence[str] = (),
    wide: bool = True,
) -> Chart | None:
    """Stacked bars of the series that have a height; None where none has.

    Of many steps each bar is the mean of a stretch, where None counts as 0: a phase that a step
    does not have took no time. hover: shown beside the value, where each bar is one step.
    """
    length = max(1, math.ceil(len(steps) / MOST_BARS))
    starts = range(0, len(steps), length)
    stretches = [range(start, min(start + length, len(steps))) for start in starts]
    middle = [(steps[each[0]] + steps[each[-1]]) / 2 for each in stretches]
    beside = {}
    if hover and length == 1:
        beside = {"customdata": list(hover), "hovertemplate": "%{y:.4~g} (%{customdata})"}
    traces = [
        _trace(
            bars.name,
            middle,
            [sum(bars.values[i] or 0.0 for i in each) / len(each) for each in stretches],
            type="bar",
            yaxis=f"y{bars.row}",
            marker={"color": f"var(--line-{bars.colour})"},
            **beside,
        )
        for bars in series
        if any(bars.values)
    ]
    if length > 1:
        plural = {"step": "steps", "push": "pushes"}[x_title]
        notes = [*notes, f"Each bar is the mean of {length} {plural}."]
    x_axis = {"title": {"text": x_title}}
    return _chart(slug, title, rows, traces, notes, x_axis=x_axis, wide=wide) if traces else None


def histogram(
    slug: str, title: str, x_title: str, counts: dict[int, int], colour: int, most: int = 40
) -> Chart | None:
    """How many answers have which number. counts: answers by that number."""
    if not counts:
        return None
    low, high = min(counts), max(counts)
    least = (high - low + 1) / most
    widths = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    width = next(width for width in widths if width >= least)
    heights = dict.fromkeys(range(low // width, high // width + 1), 0)
    for value, count in counts.items():
        heights[value // width] += count
    names = [
        str(each) if width == 1 else f"{each * width} to {(each + 1) * width - 1}"
        for each in heights
    ]
    middle = [each * width + (width - 1) / 2 for each in heights]
    trace = _trace(
        "answers",
        middle,
        list(heights.values()),
        type="bar",
        marker={"color": f"var(--line-{colour})"},
        customdata=names,
        hovertemplate="%{customdata}: %{y:.4~g}<extra></extra>",
    )
    first, last = (number(quantile(counts, share)) for share in (0.25, 0.75))
    table = Summary(x_title, sum(counts.values()), first, last, number(low), number(high))
    x_axis: Part = {"title": {"text": x_title}}
    if len(middle) < 16:
        x_axis |= {"tickvals": middle, "ticktext": names}
    return _chart(
        slug,
        title,
        ["answers"],
        [trace],
        table=[table],
        x_axis=x_axis,
        bargap=0.08,
        hovermode="closest",
    )


def quantile(counts: dict[int, int], share: float) -> int:
    """The least number that `share` of all do not exceed."""
    values = sorted(counts)
    reached = itertools.accumulate(counts[value] for value in values)
    needed = share * sum(counts.values())
    return next(value for value, below in zip(values, reached, strict=True) if below >= needed)


def present(*charts: Chart | None) -> list[Chart]:
    """Return the charts that have something to show."""
    return [chart for chart in charts if chart is not None]


# --- the curves of a run

_B = "stage2_ab/channel_b/"
_ASYNC = "stage2_ab/async/"
# An axis is logarithmic where values differ by such a factor.
_DECADES = 50
_FAMILIES = {
    "A1_text": "text, first forward",
    "A2_text": "text, last forward",
    "A2_coord": "coordinates",
    "B_rollout_text": "text",
    "B_coord": "coordinates",
}
_SCORES = {
    "eval/f1": "F1",
    "eval/f1_miou": "F1@mIoU",
    "eval/precision": "precision",
    "eval/recall": "recall",
    "eval/box_f1": "F1 of boxes alone",
    "eval/ap": "AP",
    "eval/ap50": "AP at 0.5",
    "eval/box_ap": "AP of boxes alone",
}
_FAULTS = {
    "eval/duplicates": "duplicates",
    "eval/oversized": "as large as the image",
}
_OBJECTS = {
    _B + "matched": "matched",
    _B + "fn_appended": "missed, appended",
    _B + "false_positives": "false positives",
    _B + "N_drop_invalid": "dropped",
}
_QUEUE = {
    _ASYNC + "ready_packs": "packs ready",
    _ASYNC + "version_lag": "versions of lag",
    _ASYNC + "dropped_stale": "packs dropped as stale",
    _ASYNC + "dropped_oldest": "packs dropped for newer ones",
}


def curves(run: RunView) -> list[Chart]:
    """Make the curves of a run that have something to show."""

    def named(names: dict[str, str]) -> dict[str, list[Point]]:
        return {name: run.series(key) for key, name in names.items()}

    coordinates = {
        key: key.removeprefix("coord_diag/")
        for key in keys_below(run.steps, "coord_diag/")
        if "acc_" in key or "mass" in key
    }
    rates = {
        "truncated answers": run.series("rollout/parse_truncated_rate"),
        "dropped objects": _fraction(run, _B + "N_drop_invalid", _B + "N_valid_pred"),
        "false positives": _fraction(run, _B + "false_positives", _B + "matched"),
    }
    lengths = named(
        {"rollout/gen_new_tokens_mean": "mean", "rollout/gen_new_tokens_p99": "99th percentile"}
    )
    if p99 := lengths["99th percentile"]:
        limit = float(run.config.rollout_matching.max_new_tokens)
        lengths["max_new_tokens"] = [(step, limit) for step in sorted({p99[0][0], p99[-1][0]})]
    losses = {f"channel {channel}": run.series("loss", channel) for channel in run.channels}
    scores, faults = (
        {name: points_of(run.evaluations, key) for key, name in names.items()}
        for names in (_SCORES, _FAULTS)
    )
    matched = named({_B + "match_rate": "matched ground truths"})
    rate, norm = named({"learning_rate": "rate"}), named({"grad_norm": "gradient norm"})
    clipped, log = "before it is clipped", _of_many_sizes(norm)
    return present(
        curve("loss", "Loss", "loss", losses, from_zero=False),
        _parts_of_the_loss(run, "A"),
        _parts_of_the_loss(run, "B"),
        curve("scores", "Scores of evaluations", "score", scores, shares=True),
        curve("faults", "Objects that repeat or cover the image", "an answer", faults),
        curve("match-rate", "Match rate", "share", matched, shares=True),
        curve("objects", "Objects of a step", "objects", named(_OBJECTS)),
        curve("lengths", "Lengths of answers", "tokens", lengths),
        curve("parse-rates", "Truncated, dropped, not matched", "share", rates, shares=True),
        curve(
            "coordinates",
            "Coordinate distributions",
            "share",
            named(coordinates),
            shares=True,
            from_zero=False,
        ),
        _mismatch(run, "mean", "Mismatch of engine and trainer, mean"),
        _mismatch(run, "p99", "Mismatch of engine and trainer, 99th percentile"),
        curve("queue", "Asynchronous rollouts", "packs, versions", named(_QUEUE)),
        curve("learning-rate", "Learning rate", "rate", rate, smooth=False),
        curve("grad-norm", "Gradient norm", clipped, norm, log=log),
    )


def _mismatch(run: RunView, which: str, title: str) -> Chart | None:
    """How far engine and trainer are apart, by the kind of the token."""
    series = {
        key.removeprefix("mismatch/").removesuffix(f"_{which}").replace("_", " "): run.series(key)
        for key in keys_below(run.steps, "mismatch/")
        if key.endswith(which)
    }
    return curve(f"mismatch-{which}", title, "nats", series, log=_of_many_sizes(series))


def _parts_of_the_loss(run: RunView, channel: str) -> Chart | None:
    """The atoms of a channel's loss, which may be of very different sizes."""
    series = {}
    for key in keys_below(run.steps, f"loss/{channel}"):
        _, family, name = key.split("/")
        series[f"{name} ({_FAMILIES.get(family, family)})"] = run.series(key)
    title, log = f"Parts of the loss, channel {channel}", _of_many_sizes(series)
    return curve(f"loss-{channel.lower()}", title, "loss", series, log=log, from_zero=False)


def _of_many_sizes(series: dict[str, list[Point]]) -> bool:
    """A logarithmic axis can show them, and shows more than another."""
    known = [value for points in series.values() for value in numbers(points)]
    return bool(known) and min(known) > 0 and max(known) > _DECADES * min(known)


def _fraction(run: RunView, part: str, rest: str) -> list[Point]:
    """part / (part + rest) in the steps where that is more than nothing."""
    return [
        (line["step"], line[part] / (line[part] + line[rest]))
        for line in run.steps
        if line.get(part) is not None and line.get(rest) is not None and line[part] + line[rest]
    ]


# Phases that follow each other; with what is left they are the step.
_LIVED = {"push": 5, "wait": 2, "learn": 1}
# What makes the packs that are waited for.
_MADE = {"rollout": 4, "target": 3, "pack": 8}
_MEANINGS = {
    "push": "pushing new weights",
    "wait": "waiting for packs: what of making them is not hidden behind learning",
    "learn": "forwards and backwards",
    "other": "the rest of the step",
    "rollout": "waiting for the answers",
    "target": "parsing, matching, targets, segments",
    "pack": "from segments to packs",
}
# Phases of a push, in order.
_PUSHED = {"pause": 2, "transfer": 5, "finish": 4}
_MOST_SERVERS = 8


# A row of a table: cells by the heading of their column.
Row = dict[str, str | int]


def seconds(line: Line, phase: str) -> float:
    """0 where the step has no such phase, or the log no number."""
    if phase == "other":
        known = sum(seconds(line, each) for each in _LIVED)
        return max(0.0, seconds(line, "step") - known)
    return float(line.get(f"time/{phase}_s") or 0.0)


def hidden(line: Line) -> float:
    """Seconds of making packs that passed while the step learned."""
    made = sum(seconds(line, phase) for phase in _MADE)
    return max(0.0, made - seconds(line, "wait"))


def step_chart(run: RunView) -> Chart | None:
    """Seconds of each step, and of what is made beside it; None where no step is logged."""
    lines = [line for line in run.steps if "time/step_s" in line]
    bars = [
        Bars(phase, colour, [seconds(line, phase) for line in lines], row)
        for row, phases in enumerate((_LIVED | {"other": 6}, _MADE), start=1)
        for phase, colour in phases.items()
    ]
    made = sum(seconds(line, phase) for line in run.steps for phase in _MADE)
    saved = sum(map(hidden, run.steps))
    of_all = f" ({fraction(saved, made, places=0)})" if made else ""
    notes = [
        "Above: what the step went through, one after the other; together they are the whole step.",
        "Below: what it took to make its packs. Where the next answers are made while the last are "
        "learned, these seconds passed beside those of learn, so they are not added to the step: "
        "what could not be hidden is wait.",
        f"Hidden behind learning: {number(round(saved, 1))} of {number(round(made, 1))} s{of_all}.",
        "With several learner processes each number is that of the slowest.",
    ]
    if run.config.rollout_matching.async_rollout.enabled:
        notes.append("Asynchronous rollouts are made beside all of this, and are not in it.")
    rows, steps = ["the step, s", "making packs, s"], [line["step"] for line in lines]
    return bar_chart("steps", "Seconds of each step", rows, steps, bars, notes)


def phase_rows(run: RunView) -> dict[str, list[Row]]:
    """Phases that took any time, by the clock that they are of."""
    lines = [line for line in run.steps if "time/step_s" in line]
    whole = sum(seconds(line, "step") for line in lines)
    phases = {
        "one after the other": [*_LIVED, "other"],
        "making packs: within wait, or beside learn": list(_MADE),
    }
    rows: dict[str, list[Row]] = {}
    for title, phase in ((title, phase) for title, own in phases.items() for phase in own):
        if not (total := sum(seconds(line, phase) for line in lines)):
            continue
        row: Row = {"phase": phase, "seconds": f"{total:,.1f}"}
        row["of all steps' time"] = fraction(total, whole)
        for channel in "AB":
            took = [seconds(line, phase) for line in of_channel(lines, channel)]
            mean = f"{sum(took) / len(took):,.3f}" if took else "-"
            row[f"s per step of {channel}"] = mean
        rows.setdefault(title, []).append(row | {"": _MEANINGS[phase]})
    return rows


def push_charts(run: RunView) -> list[Chart]:
    """One for each server, of its pushes in order."""
    servers: dict[str, list[tuple[str, Line]]] = {}
    for line in run.calls:
        when = f"step {line['step']}" if "step" in line else "evaluation"
        for push in line.get("pushes", ()):
            servers.setdefault(push["server"], []).append((when, push))
    shown = list(servers.items())[:_MOST_SERVERS]
    return present(
        *(
            bar_chart(
                f"push-{place}",
                f"Pushes to {server}",
                ["seconds"],
                range(1, len(pushes) + 1),
                [
                    Bars(phase, colour, [push["seconds"].get(phase) for _, push in pushes])
                    for phase, colour in _PUSHED.items()
                ],
                x_title="push",
                hover=[f"{when}, version {push['version']}" for when, push in pushes],
            )
            for place, (server, pushes) in enumerate(shown, start=1)
        )
    )


def push_meanings(charts: Sequence[Chart]) -> dict[str, str]:
    """The phases that the charts have."""
    names = {trace["name"] for chart in charts for trace in chart.figure["data"]}
    return {phase: meaning for phase, meaning in SYNC_PHASES.items() if phase in names}


def server_rows(run: RunView) -> list[Row]:
    """Servers in the order in which they appear in the log; also the learner itself."""
    pushes = [push for line in run.calls for push in line.get("pushes", ())]
    calls = [call for line in run.calls for call in line.get("calls", ())]
    lost = [server for line in run.calls for server, _ in line.get("lost", ())]
    configured = [entry["base_url"] for entry in run.facts.get("servers", ())]
    rows: list[Row] = []
    for server in dict.fromkeys(
        [*configured, *(each["server"] for each in [*pushes, *calls]), *lost]
    ):
        own = [push for push in pushes if push["server"] == server]
        asked = [call for call in calls if call["server"] == server]
        answered = [call for call in asked if call["outcome"] == "answered"]
        totals = [push["seconds"]["total"] for push in own]
        largest = max((push["bytes"] for push in own), default=0) / 1e6
        row: Row = {
            "server": server,
            "pushes": len(own),
            "again": sum(bool(push["again"]) for push in own),
            "mean": f"{number(sum(totals) / len(totals))} s" if own else "-",
            "slowest": f"{number(max(totals))} s" if own else "-",
            "payload": f"{number(round(largest, 1))} MB" if own else "-",
            "calls answered": len(answered),
            "failed": len(asked) - len(answered),
            "requests answered": sum(call["count"] for call in answered),
            "times lost": lost.count(server),
        }
        rows.append(row)
    return rows
