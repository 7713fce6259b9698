"""Where the seconds of a step, and of a push, went.

What is made beside training is drawn in a row of its own: in a step whose rollouts overlap with
learning, its seconds and those of learning are the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from learner.metrics.declared import SYNC_PHASES
from learner.metrics.figures import number, share
from learner.report.charts import Bars, Chart, Trace
from learner.report.run_view import Line, RunView, of_channel

# Phases that follow each other; with what is left they are the step.
_LIVED = {"push": 5, "wait": 2, "learn": 1}
# What makes the packs that are waited for.
_MADE = {"rollout": 4, "target": 3, "pack": 8}
_MEANINGS = {
    "push": "bringing new weights to who generates",
    "wait": "waiting for packs: what of making them is not hidden behind learning",
    "learn": "forwards and backwards",
    "other": "the rest of the step",
    "rollout": "waiting for the answers",
    "target": "parsing, matching, targets, segments",
    "pack": "from segments to packs",
}
# Of a push, on the clock of the learner; the others are the server's.
_OF_LEARNER = {"start": 3, "send": 1, "finish": 4}
_OF_SERVER = {"pause": 2, "transfer": 5, "load": 6, "verify": 7, "caches": 8}
_MOST_SERVERS = 8


@dataclass(frozen=True)
class PhaseRow:
    """A phase over the whole run. total: seconds. per_a, per_b: seconds of a step."""

    name: str
    meaning: str
    total: str
    share: str
    per_a: str
    per_b: str


@dataclass(frozen=True)
class ServerRow:
    """What a server was asked and given."""

    server: str
    pushes: int
    again: int
    mean: str
    slowest: str
    payload: str
    answered: int
    failed: int
    requests: int
    lost: int


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
    lines = [line for line in run.steps if "time/step_s" in line]
    if not lines:
        return None
    bars = Bars.over([line["step"] for line in lines])

    def trace(phase: str, colour: int, row: int) -> Trace:
        return bars.trace(phase, [seconds(line, phase) for line in lines], colour, row)

    traces = [trace(phase, colour, 1) for phase, colour in (_LIVED | {"other": 6}).items()]
    traces += [trace(phase, colour, 2) for phase, colour in _MADE.items()]
    traces = [each for each in traces if any(each.y)]
    rows = ["the step, s", "making packs, s"]
    return Chart("steps", "Seconds of each step", rows, traces, _notes(run, bars), wide=True)


def _notes(run: RunView, bars: Bars) -> list[str]:
    lines = run.steps
    made = sum(seconds(line, phase) for line in lines for phase in _MADE)
    saved = sum(map(hidden, lines))
    of_all = f" ({share(saved, made, places=0)})" if made else ""
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
    return [*notes, bars.note] if bars.note else notes


def phase_rows(run: RunView) -> dict[str, list[PhaseRow]]:
    """Phases that took any time, by the clock that they are of."""
    lines = [line for line in run.steps if "time/step_s" in line]
    parts = {
        "one after the other": [*_LIVED, "other"],
        "making packs: within wait, or beside learn": list(_MADE),
    }
    rows = {
        title: [row for phase in phases if (row := _phase_row(lines, phase))]
        for title, phases in parts.items()
    }
    return {title: found for title, found in rows.items() if found}


def _phase_row(lines: list[Line], phase: str) -> PhaseRow | None:
    whole = sum(seconds(line, "step") for line in lines)
    total = sum(seconds(line, phase) for line in lines)
    if not total:
        return None
    of_a, of_b = (_mean(of_channel(lines, each), phase) for each in "AB")
    return PhaseRow(phase, _MEANINGS[phase], f"{total:,.1f}", share(total, whole), of_a, of_b)


def _mean(lines: Sequence[Line], phase: str) -> str:
    return f"{sum(seconds(line, phase) for line in lines) / len(lines):,.3f}" if lines else "-"


def push_charts(run: RunView) -> list[Chart]:
    """One for each server, of its pushes in order."""
    servers: dict[str, list[tuple[str, Line]]] = {}
    for line in run.calls:
        when = f"step {line['step']}" if "step" in line else "evaluation"
        for push in line.get("pushes", ()):
            servers.setdefault(push["server"], []).append((when, push))
    shown = list(servers.items())[:_MOST_SERVERS]
    return [_push_chart(place, server, pushes) for place, (server, pushes) in enumerate(shown)]


def _push_chart(place: int, server: str, pushes: list[tuple[str, Line]]) -> Chart:
    bars = Bars.over(range(1, len(pushes) + 1))
    traces = []
    for phase, colour in (_OF_LEARNER | _OF_SERVER).items():
        values = [push["seconds"].get(phase) for _, push in pushes]
        if any(values):
            traces.append(bars.trace(phase, values, colour, 1 if phase in _OF_LEARNER else 2))
    if not bars.note:
        hover = [f"{when}, version {push['version']}" for when, push in pushes]
        traces = [
            Trace(each.name, each.x, each.y, each.colour, "bar", each.row, hover=hover)
            for each in traces
        ]
    notes = [bars.note.replace("steps", "pushes")] if bars.note else []
    rows = ["learner, s", "server, s"]
    title = f"Pushes to {server}"
    return Chart(f"push-{place + 1}", title, rows, traces, notes, x_title="push", wide=True)


def push_meanings(charts: Sequence[Chart]) -> dict[str, str]:
    """The phases that the charts have."""
    names = {trace.name for chart in charts for trace in chart.traces}
    return {phase: meaning for phase, meaning in SYNC_PHASES.items() if phase in names}


def server_rows(run: RunView) -> list[ServerRow]:
    """Servers in the order in which they appear in the log; also the learner itself."""
    pushes = [push for line in run.calls for push in line.get("pushes", ())]
    calls = [call for line in run.calls for call in line.get("calls", ())]
    lost = [server for line in run.calls for server, _ in line.get("lost", ())]
    configured = [entry["base_url"] for entry in run.facts.get("servers", ())]
    named = [*configured, *(each["server"] for each in [*pushes, *calls]), *lost]
    return [
        _server_row(
            server,
            [push for push in pushes if push["server"] == server],
            [call for call in calls if call["server"] == server],
            lost.count(server),
        )
        for server in dict.fromkeys(named)
    ]


def _server_row(server: str, pushes: list[Line], calls: list[Line], lost: int) -> ServerRow:
    totals = [push["seconds"]["total"] for push in pushes]
    answered = [call for call in calls if call["outcome"] == "answered"]
    return ServerRow(
        server,
        len(pushes),
        sum(bool(push["again"]) for push in pushes),
        f"{number(sum(totals) / len(totals))} s" if totals else "-",
        f"{number(max(totals))} s" if totals else "-",
        f"{number(round(max(push['bytes'] for push in pushes) / 1e6, 1))} MB" if pushes else "-",
        len(answered),
        len(calls) - len(answered),
        sum(call["count"] for call in answered),
        lost,
    )
