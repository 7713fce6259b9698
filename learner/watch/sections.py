"""Parts of the view: each is a title and lines that fit a width."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.text import Text

from learner.metrics.figures import duration, narrow_number, score
from learner.metrics.step_line import channel_of
from learner.watch.spark import Glyphs, bar, sparkline
from learner.watch.watched import Numbers, Server, Watched
from shared_contracts.printable import printable

Lines = list[Text]

# From the first to the last of a step; `push` is before the answers, or beside.
_PHASES = ("push", "rollout", "target", "pack", "wait", "learn")
_ALL = "step"
_MEAN_OF = 20
_VALUE = 9
_LEAST_SPARK = 6
_STRICT_DROP = "stage2_ab/channel_b/strict_drop/"
_ANSWERS = {
    "rollouts/s": "rollout/per_second",
    "tokens, mean": "rollout/gen_new_tokens_mean",
    "tokens, p99": "rollout/gen_new_tokens_p99",
    "truncated": "rollout/parse_truncated_rate",
    "match rate": "stage2_ab/channel_b/match_rate",
    "valid": "stage2_ab/channel_b/N_valid_pred",
    "missed": "stage2_ab/channel_b/fn_appended",
    "gated pairs": "stage2_ab/channel_b/gated",
    "guard triggers": "rollout/repeat_terminate_triggered_sequences",
    "ready packs": "stage2_ab/async/ready_packs",
    "version lag": "stage2_ab/async/version_lag",
}
_SYNC = {
    "whole push, s": "sync/total_s",
    "send, s": "sync/send_s",
    "load, s": "sync/load_s",
    "verify, s": "sync/verify_s",
    "GB/s": "sync/gb_per_s",
}
_SCORES = ("f1", "precision", "recall", "box_f1")


@dataclass(frozen=True)
class Section:
    """least: lines, without the title, below which it says too little."""

    title: str
    lines: Lines
    least: int = 1


Maker = Callable[[Watched, int, Glyphs], Section]


def head(run: Watched, width: int, glyphs: Glyphs) -> Lines:
    """What run, how far, how long still, and whether it lives."""
    name = Text(printable(run.config.training.run_name), style="bold")
    return [
        _fitted(width, name, *_alive(run), glyphs=glyphs),
        _progress(run, width, glyphs),
        _fitted(width, *_now(run), glyphs=glyphs),
    ]


def _fitted(width: int, *parts: Text, glyphs: Glyphs) -> Text:
    """As many of the parts as fit, with dots between; the first one is cut if need be."""
    line = parts[0].copy()
    line.truncate(width, overflow="ellipsis" if glyphs.dot == "·" else "crop")
    for part in parts[1:]:
        if line.cell_len + 3 + part.cell_len > width:
            break
        line.append(f" {glyphs.dot} ", style="dim").append_text(part)
    return line


def _alive(run: Watched) -> list[Text]:
    styles = {"running": "green", "finished": "green", "starting": "yellow"}
    state = Text(f"{'process ' if run.state == 'gone' else ''}{run.state}")
    state.stylize(styles.get(run.state, "bold red"))
    parts = [state]
    if run.state != "finished" and run.silent_s is not None:
        silent = Text(f"{'no' if _worrying(run) else 'last'} step ")
        silent.append(f"{'for ' if _worrying(run) else ''}{duration(run.silent_s)}")
        silent.append("" if _worrying(run) else " ago")
        silent.stylize("bold red" if _worrying(run) else "")
        parts.append(silent)
    if run.ended is not None:
        parts.append(Text(_took(run, run.ended)))
    if mark := run.facts.get("process"):
        parts.append(Text(printable(f"{mark['host']}, pid {mark['pid']}"), style="dim"))
    return parts


def _took(run: Watched, ended: Numbers) -> str:
    """Trainer counts from where its own process began."""
    went_on = run.facts.get("started_at_step", 0)
    since = f" since step {went_on}" if went_on else ""
    return f"took {duration(ended['train_runtime'])}{since}"


def _worrying(run: Watched) -> bool:
    return run.state == "gone" or run.unusually_silent


def _progress(run: Watched, width: int, glyphs: Glyphs) -> Text:
    total = run.total
    count = f"step {run.step}/{total if total is not None else '?'}"
    left = f" ETA {duration(run.seconds_left)}" if run.state in ("running", "starting") else ""
    if total is None:
        return Text(count[:width])
    share = run.step / total
    ends = f"{share:4.0%}{left}"
    room = width - len(count) - len(ends) - 2
    if room < _LEAST_SPARK:
        return Text(f"{count} {ends}"[:width])
    full, empty = bar(share, room, glyphs)
    return Text.assemble(count, " ", (full, "green"), (empty, "dim"), " ", ends)


def _now(run: Watched) -> list[Text]:
    if not run.steps:
        return [Text("before its first step")]
    last = run.steps[-1]
    parts = [Text(f"channel {channel_of(last)}")]
    if run.seconds_per_step is not None:
        parts.append(Text(f"{narrow_number(run.seconds_per_step)} s a step"))
    if run.checkpoints:
        parts.append(Text(printable(run.checkpoints[0][0])))
    if "sync/weights_version" in last:
        parts.append(Text(f"weights {narrow_number(last['sync/weights_version'])}"))
    parts.append(Text(f"lr {narrow_number(last.get('learning_rate'))}"))
    parts.append(Text(f"grad norm {narrow_number(last.get('grad_norm'))}"))
    return parts


def losses(run: Watched, width: int, glyphs: Glyphs) -> Section:
    """The loss of either channel and its parts, the last ones first declared."""
    lines = []
    for channel in ("A", "B"):
        of = [step for step in run.steps if channel_of(step) == channel]
        if not of:
            continue
        lines.append(_row(f"loss, {channel}", [s["loss"] for s in of], width, glyphs, "bold"))
        parts = [key for key in of[-1] if key.startswith("loss/")]
        lines += [
            _row(key.removeprefix("loss/"), [s.get(key) for s in of], width, glyphs)
            for key in parts
        ]
    return Section("Loss", _interleaved(lines), least=2)


def _interleaved(lines: Lines) -> Lines:
    """Totals first, so that a low terminal shows both."""
    totals = [line for line in lines if line.plain.startswith("loss, ")]
    return [*totals, *(line for line in lines if line not in totals)]


def times(run: Watched, width: int, glyphs: Glyphs) -> Section:
    """Mean seconds of each phase of the last steps of either channel, as bars."""
    means = [(c, name, s) for c in ("B", "A") for name, s in _phase_means(run, c).items()]
    means.sort(key=lambda mean: mean[1] != _ALL)  # so that a low terminal shows both
    longest = max((seconds for _, _, seconds in means), default=0.0)
    lines = []
    for channel, name, seconds in means:
        label, value = f"{name}, {channel}", f"{seconds:.2f} s"
        line = Text(f"{label:<{min(14, width)}}{value:>{_VALUE}}")
        if (room := width - line.cell_len - 1) >= _LEAST_SPARK and longest:
            full, _ = bar(seconds / longest, room, glyphs)
            line.append(f" {full}", style="green" if channel == "A" else "cyan")
        lines.append(_cut(line, width))
    return Section("Seconds of a step", lines, least=2)


def _phase_means(run: Watched, channel: str) -> dict[str, float]:
    of = [step for step in run.steps if channel_of(step) == channel][-_MEAN_OF:]
    keys = {_ALL: "time/step_s", **{phase: f"time/{phase}_s" for phase in _PHASES}}
    found = {name: [step[key] for step in of if step.get(key)] for name, key in keys.items()}
    return {name: fmean(values) for name, values in found.items() if values}


def answers(run: Watched, width: int, glyphs: Glyphs) -> Section:
    """What came from the servers, and why objects were dropped."""
    of = [step for step in run.steps if "rollout/per_second" in step]
    lines = _table_of(of, _ANSWERS, width, glyphs)
    if of:
        dropped = {
            key.removeprefix(_STRICT_DROP): sum(step.get(key) or 0 for step in of)
            for key in of[-1]
            if key.startswith(_STRICT_DROP)
        }
        told = [f"{reason} {narrow_number(n)}" for reason, n in dropped.items() if n]
        lines.insert(3, _cut(Text(f"dropped: {', '.join(told) or 'none'}"), width))
    return Section("Answers", lines, least=4)


def sync(run: Watched, width: int, glyphs: Glyphs) -> Section:
    of = [step for step in run.steps if "sync/total_s" in step]
    return Section("Pushes of weights", _table_of(of, _SYNC, width, glyphs))


def _table_of(steps: Sequence[Numbers], keys: dict[str, str], width: int, glyphs: Glyphs) -> Lines:
    return [
        _row(label, [step.get(key) for step in steps], width, glyphs)
        for label, key in keys.items()
        if steps and key in steps[-1]
    ]


def scores(run: Watched, width: int, glyphs: Glyphs) -> Section:
    """Of every evaluation, the newest first."""
    if not run.evaluations:
        return Section("Evaluations", [])
    shown = [name for name in _SCORES if f"eval/{name}" in run.evaluations[-1]]
    shown = shown[: max(1, (width - 8) // 10)]
    title = Text(f"{'step':>7}" + "".join(f"{name:>10}" for name in shown), style="dim")
    rows = [
        Text(
            f"{line['step']:>7}"
            + "".join(f"{score(line.get(f'eval/{name}')):>10}" for name in shown)
        )
        for line in reversed(run.evaluations)
    ]
    trend = [line.get("eval/f1") for line in run.evaluations]
    lines = [_cut(line, width) for line in (title, *rows)]
    if len(trend) > 1:
        lines.insert(1, _row("f1", trend, width, glyphs))
    return Section("Evaluations", lines, least=2)


def servers(run: Watched, width: int, glyphs: Glyphs) -> Section:
    """Of each server what the calls tell; columns go from the right where it is narrow."""
    seen = run.servers
    if not seen:
        return Section("Servers", [])
    columns = _server_columns(seen)
    url = max(len(printable(name)) for name in seen)
    while columns and url + sum(_width(c) for c in columns) > width and len(columns) > 1:
        columns.pop()
    room = max(8, width - sum(_width(c) for c in columns))
    lines = [Text(" " * min(url, room) + "".join(_cell(c, c[0]) for c in columns), style="dim")]
    for place, name in enumerate(seen):
        line = Text(f"{printable(name)[:room]:<{min(url, room)}}")
        for column in columns:
            line.append(_cell(column, column[1][place]))
        line.stylize("bold red" if seen[name].state == "lost" else "")
        lines.append(line)
    return Section("Servers", [_cut(line, width) for line in lines], least=2)


Column = tuple[str, list[str]]


def _server_columns(seen: dict[str, Server]) -> list[Column]:
    of = list(seen.values())
    return [
        ("state", [server.state for server in of]),
        ("failed", [str(server.failed) for server in of]),
        ("answers", [str(server.requests) for server in of]),
        ("version", ["" if server.version is None else str(server.version) for server in of]),
        ("push", ["" if s.push_s is None else f"{s.push_s:.2f} s" for s in of]),
        ("calls", [str(server.calls) for server in of]),
        ("pushes", [str(server.pushes) for server in of]),
    ]


def _width(column: Column) -> int:
    return 2 + max(len(column[0]), *(len(value) for value in column[1]))


def _cell(column: Column, value: str) -> str:
    return f"{value:>{_width(column)}}"


def events(run: Watched, width: int, glyphs: Glyphs) -> Section:
    """What a person should know, the newest first."""
    said = [
        f"{'eval' if event.at is None else event.at:>6} {printable(event.what)}"
        for event in reversed(run.events)
    ]
    lines = [_cut(Text(line, style="yellow"), width) for line in said]
    return Section("Events", lines, least=1)


def _row(
    label: str,
    values: Iterable[float | None],
    width: int,
    glyphs: Glyphs,
    style: str = "",
) -> Text:
    """Label, last value, and the way there as far as there is room."""
    listed = list(values)
    room = max(4, min(24, width - _VALUE - 1))
    value = narrow_number(listed[-1]) if listed else ""
    line = Text(f"{label[:room]:<{room}} {value:>{_VALUE}}", style=style)
    if (left := width - line.cell_len - 1) >= _LEAST_SPARK:
        line.append(f" {sparkline(listed, left, glyphs)}", style="cyan")
    return _cut(line, width)


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="crop")
    return line
