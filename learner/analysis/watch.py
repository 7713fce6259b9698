"""Show a run folder in a terminal from its files alone, which are only read (`watched`).

With a screen `View` is drawn with rich on the whole of it; elsewhere each new step is a line.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from statistics import fmean
from types import FrameType

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from learner.analysis.watched import Numbers, Watched
from learner.runs.console import channel_of, duration, narrow_number, score, step_line, tell
from learner.runs.declared import ANSWER_FAULTS
from learner.runs.run_folder import LOGS, RESOLVED, RUN, RunFolder
from shared_contracts.cli import printable
from shared_contracts.errors import ContractError, RunError

_EVERY_S = 0.5
_WAIT_EVERY_S = 0.05
_WIDTH_OF_A_FILE = 100
_TWO_COLUMNS = 110
_LABEL = 24
_ENDED_BY_SIGNAL = 128

# From the first to the last of a step; `push` is before the answers, or beside.
_PHASES = ("step", "push", "rollout", "target", "pack", "wait", "learn")
_MEAN_OF = 20
_CHANNEL_B = "stage2_ab/channel_b/"
# Keys of the reasons for which objects, or all of an answer, were dropped.
_REASONS = (f"{_CHANNEL_B}strict_drop/", *(_CHANNEL_B + name for name in ANSWER_FAULTS))
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
    "transfer, s": "sync/transfer_s",
    "proof, s": "sync/probe_s",
    "GB/s": "sync/gb_per_s",
}
_SCORES = ("f1", "precision", "recall", "box_f1")
_STYLES = {"running": "green", "finished": "green", "starting": "yellow"}


def await_run(path: Path, wait_s: float) -> RunFolder:
    """Open the run folder as soon as a run has begun to write it.

    wait_s: seconds to wait while the path does not exist, or holds nothing of a run yet.

    Raises:
        ContractError: it is something else, or no run has started in time.
    """
    if wait_s and _may_start(path):
        console = _console()
        tell(console, f"waiting for {printable(path)} to start (at most {duration(wait_s)})")
        console.file.flush()
        end = time.monotonic() + wait_s
        while _may_start(path):
            if time.monotonic() > end:
                raise ContractError(
                    str(path),
                    f"no run has started there in {duration(wait_s)}",
                    "Name the training.output_dir of a run, or wait longer with --wait",
                )
            time.sleep(_WAIT_EVERY_S)
        tell(console, f"{printable(path)} has started")
    return RunFolder.open(path)


def _may_start(path: Path) -> bool:
    """Return whether a run that starts now can use this folder: it holds nothing else."""
    try:
        names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False
    return not names >= {RUN, RESOLVED} and names <= {RUN, RESOLVED, LOGS}


def watch_run(folder: RunFolder, once: bool, follow: bool) -> None:
    """Show the run until it has finished.

    once: print one frame and return. follow: stay when it has ended.

    Raises:
        RunError: the process that writes the folder is gone, or the folder is.
    """
    run, console = Watched(folder), _console()
    new = run.look()[-1:]
    if once:
        console.print(View(run))
        return
    on_screen = console.is_terminal and not console.is_dumb_terminal
    lines = None if on_screen else _Lines(run, console)
    live = Live(View(run), console=console, screen=True, auto_refresh=False)
    with _exit_on_signals(), ExitStack() as stack:
        if on_screen:
            stack.callback(live.stop)  # `with live` does not restore the terminal within its start
            live.start()
        while True:
            live.refresh() if lines is None else lines.print(new)
            if not follow and run.state in ("finished", "gone", "removed"):
                break
            time.sleep(_EVERY_S)
            new = run.look()
    if on_screen:
        console.print(View(run))  # the last frame stays on the usual screen
    if run.state == "gone":
        mark = run.facts["process"]
        raise RunError(
            f"{run.path}: process {mark['pid']} on {printable(mark['host'])} is gone, and the run "
            f"has not finished: no step for {duration(run.silent_s)}, at step {run.step}. With "
            "training.resume: auto the same command goes on"
        )
    if run.state == "removed":
        raise RunError(f"{run.path} is no run folder any more")


def _console() -> Console:
    """Make the console of standard output; a terminal is asked for its size at every frame."""
    if sys.stdout.isatty():
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)
    elif not os.environ.get("COLUMNS"):
        os.environ["COLUMNS"] = str(_WIDTH_OF_A_FILE)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False, emoji=False)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Exit through the `with` blocks, so that the terminal is restored."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_ENDED_BY_SIGNAL + number)

    former = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class _Lines:
    """Prints a line for each new step, evaluation and event."""

    def __init__(self, run: Watched, console: Console) -> None:
        self._run, self._console = run, console
        self._told = 0
        self._say(f"{printable(run.config.training.run_name)}: {printable(run.path)}")
        if run.state == "starting":
            self._say("waiting for the first step")

    def print(self, new: Iterable[Numbers]) -> None:
        for line in new:
            self._say(self._line(line))
        for event in self._run.events:
            if event.number > self._told:
                at = "evaluation" if event.at is None else f"step {event.at}"
                self._say(f"{at}: {printable(event.what)}")
                self._told = event.number

    def _say(self, text: str) -> None:
        tell(self._console, text)
        self._console.file.flush()

    def _line(self, line: Numbers) -> str:
        if "loss" in line:
            return step_line(line["step"], self._run.total, line)
        scores = {key.removeprefix("eval/"): value for key, value in line.items() if "/" in key}
        if "f1" in scores:
            named = [n for n in ("f1", "precision", "recall") if scores.get(n) is not None]
            shown = " ".join(f"{name} {score(scores[name])}" for name in named)
            return f"step {line['step']} evaluation {shown}"
        ended = f"step {line['step']} training has ended after {duration(line['train_runtime'])}"
        went_on = self._run.facts.get("started_at_step", 0)
        return f"{ended}, counted from step {went_on}" if went_on else ended


# --- the screen


class View:
    """The whole view of a run, fitted to the console that it is drawn on."""

    def __init__(self, run: Watched) -> None:
        self._run = run

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        run = self._run
        yield from (_name_and_state(run), _progress(run, options.max_width), _now(run), Text())
        losses, events, evaluations = _losses(run), _events(run), _evaluations(run)
        times, answers = _times(run), _answers(run)
        servers = Section("Servers", _Servers(run))
        sync = _table_of(run, "Pushes of weights", _SYNC, "sync/total_s")
        room = None if options.height is None else max(0, options.height - 4)
        if options.max_width < _TWO_COLUMNS:
            yield _Column([losses, events, times, evaluations, answers, servers, sync], room)
            return
        columns = Table.grid(Column(ratio=1), Column(ratio=1), padding=(0, 3, 0, 0), expand=True)
        columns.add_row(
            _Column([losses, evaluations, events], room),
            _Column([times, answers, servers, sync], room),
        )
        yield columns


@dataclass(frozen=True)
class Section:
    """A title and what stands below it, a line for each row."""

    title: str
    body: RenderableType = ""


@dataclass(frozen=True)
class _Column:
    """Sections below each other. room: lines; with too few of them, every section is cut first."""

    sections: Sequence[Section]
    room: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.update(height=None)
        drawn = [(s.title, console.render_lines(s.body, inner)) for s in self.sections if s.body]
        most = max((len(lines) for _, lines in drawn), default=0)
        while self.room is not None and most > 2:
            if sum(min(len(lines), most) + 2 for _, lines in drawn) - 1 <= self.room:
                break
            most -= 1
        for place, (title, lines) in enumerate(drawn):
            if place:
                yield Text()
            yield _text(title, "bold underline")
            for line in lines[:most]:
                yield from line
                yield Segment.line()


@dataclass(frozen=True)
class Sparkline:
    """The last values between their lowest and their highest; several to a bar if need be."""

    values: Sequence[float | None]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.bars(options.max_width, options.ascii_only), "cyan", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)

    def bars(self, width: int, ascii_only: bool = False) -> str:
        """Draw at most `width` bars; each is the mean of its neighbours."""
        levels = "_.-=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
        if width < 1 or not self.values:
            return ""
        each = math.ceil(len(self.values) / width)
        parts = [self.values[at : at + each] for at in range(0, len(self.values), each)]
        finite = [[v for v in part if v is not None and math.isfinite(v)] for part in parts]
        means = [fmean(part) if part else None for part in finite]
        low = min((mean for mean in means if mean is not None), default=0.0)
        span = max((mean for mean in means if mean is not None), default=0.0) - low
        scale = (len(levels) - 1) / span if span else 0.0
        return "".join(" " if m is None else levels[round((m - low) * scale)] for m in means)


def _text(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="crop")


def _rows(rows: Iterable[tuple[str, str, RenderableType]], bold: int = 0) -> Table:
    """A label, a value, and a picture of it; the first `bold` rows are totals."""
    label = Column(no_wrap=True, overflow="crop", max_width=_LABEL, min_width=8)
    value = Column(no_wrap=True, overflow="crop", justify="right", min_width=9)
    table = Table.grid(label, value, Column(ratio=1), padding=(0, 1, 0, 0), expand=True)
    for place, row in enumerate(rows):
        table.add_row(*row, style="bold" if place < bold else "")
    return table


def _measure(label: str, values: Iterable[float | None]) -> tuple[str, str, RenderableType]:
    """The row of a metric: its last value, and the way there."""
    listed = list(values)
    return label, narrow_number(listed[-1]), Sparkline(listed)


def _name_and_state(run: Watched) -> Text:
    alarming = run.state == "gone" or run.unusually_silent
    state = f"{'process ' if run.state == 'gone' else ''}{run.state}"
    parts = [
        Text(printable(run.config.training.run_name), "bold"),
        Text(state, _STYLES.get(run.state, "bold red")),
    ]
    if run.state != "finished" and run.silent_s is not None:
        silent = duration(run.silent_s)
        said = f"no step for {silent}" if alarming else f"last step {silent} ago"
        parts.append(Text(said, "bold red" if alarming else ""))
    if run.ended is not None:
        went_on = run.facts.get("started_at_step", 0)  # Trainer counts from its own process's start
        since = f" since step {went_on}" if went_on else ""
        parts.append(Text(f"took {duration(run.ended['train_runtime'])}{since}"))
    if mark := run.facts.get("process"):
        parts.append(Text(printable(f"{mark['host']}, pid {mark['pid']}"), "dim"))
    return _joined(parts)


def _joined(parts: Iterable[Text]) -> Text:
    line = Text(", ").join(parts)
    line.no_wrap, line.overflow = True, "crop"
    return line


def _progress(run: Watched, width: int) -> RenderableType:
    count = f"step {run.step}/{'?' if run.total is None else run.total}"
    left = f" ETA {duration(run.seconds_left)}" if run.state in ("running", "starting") else ""
    ends = "" if run.total is None else f"{run.step / run.total:4.0%}{left}"
    if run.total is None or (room := width - len(count) - len(ends) - 2) < 1:
        return _text(f"{count} {ends}")
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_row(count, ProgressBar(total=run.total, completed=run.step, width=room), ends)
    return row


def _now(run: Watched) -> Text:
    if not run.steps:
        return _text("before its first step")
    last = run.steps[-1]
    parts = [f"channel {channel_of(last)}"]
    if run.seconds_per_step is not None:
        parts.append(f"{narrow_number(run.seconds_per_step)} s a step")
    if run.checkpoints:
        parts.append(printable(run.checkpoints[0][0]))
    if "sync/weights_version" in last:
        parts.append(f"weights {narrow_number(last['sync/weights_version'])}")
    parts.append(f"lr {narrow_number(last.get('learning_rate'))}")
    parts.append(f"grad norm {narrow_number(last.get('grad_norm'))}")
    return _joined(map(Text, parts))


def _losses(run: Watched) -> Section:
    """The loss of either channel, then its parts, so that a low terminal shows both totals."""
    totals, parts = [], []
    for channel in ("A", "B"):
        if of := [step for step in run.steps if channel_of(step) == channel]:
            totals.append(_measure(f"loss, {channel}", [step["loss"] for step in of]))
            for key in [key for key in of[-1] if key.startswith("loss/")]:
                parts.append(_measure(key.removeprefix("loss/"), [step.get(key) for step in of]))
    return Section("Loss", _rows(totals + parts, bold=len(totals)) if totals else "")


def _events(run: Watched) -> Section:
    """What a person should know, the newest first."""
    said = [
        _text(f"{'eval' if event.at is None else event.at:>6} {printable(event.what)}", "yellow")
        for event in reversed(run.events)
    ]
    return Section("Events", Group(*said) if said else "")


def _times(run: Watched) -> Section:
    """Mean seconds of each phase of the last steps of either channel, as bars."""
    means = []
    for channel, style in (("B", "cyan"), ("A", "green")):
        of = [step for step in run.steps if channel_of(step) == channel][-_MEAN_OF:]
        for phase in _PHASES:
            if took := [step[f"time/{phase}_s"] for step in of if step.get(f"time/{phase}_s")]:
                means.append((f"{phase}, {channel}", fmean(took), style))
    means.sort(key=lambda mean: not mean[0].startswith("step, "))
    longest = max((seconds for _, seconds, _ in means), default=0.0)
    rows = [
        (
            label,
            f"{seconds:.2f} s",
            ProgressBar(
                longest, seconds, complete_style=style, finished_style=style, style="black"
            ),
        )
        for label, seconds, style in means
    ]
    return Section("Seconds of a step", _rows(rows) if rows else "")


def _table_of(run: Watched, title: str, keys: dict[str, str], needed: str) -> Section:
    """The metrics `keys` of the steps that have the metric `needed`, by label."""
    of = [step for step in run.steps if needed in step]
    rows = [
        _measure(label, [step.get(key) for step in of])
        for label, key in keys.items()
        if of and key in of[-1]
    ]
    return Section(title, _rows(rows) if rows else "")


def _answers(run: Watched) -> Section:
    """What came from the servers, and why objects or answers were dropped."""
    section = _table_of(run, "Answers", _ANSWERS, "rollout/per_second")
    totals: dict[str, float] = {}
    for step in run.steps:
        for key, dropped in step.items():
            if key.startswith(_REASONS) and dropped:
                reason = key.rpartition("/")[2]
                totals[reason] = totals.get(reason, 0) + dropped
    said = ", ".join(f"{reason} {narrow_number(n)}" for reason, n in totals.items())
    dropped_line = _text(f"dropped: {said or 'none'}")
    return Section(section.title, Group(dropped_line, section.body) if section.body else "")


def _evaluations(run: Watched) -> Section:
    """The scores of every evaluation, the newest first."""
    if not run.evaluations:
        return Section("Evaluations")
    names = [name for name in _SCORES if f"eval/{name}" in run.evaluations[-1]]
    headers = [
        Column(name, width=width, justify="right", no_wrap=True, overflow="crop")
        for name, width in (("step", 7), *((name, 10) for name in names))
    ]
    table = Table(*headers, box=None, padding=0, header_style="dim")
    for line in reversed(run.evaluations):
        table.add_row(str(line["step"]), *(score(line.get(f"eval/{name}")) for name in names))
    trend = [line.get("eval/f1") for line in run.evaluations]
    parts = [_rows([_measure("f1", trend)])] if len(trend) > 1 else []
    return Section("Evaluations", Group(*parts, table))


@dataclass(frozen=True)
class _Servers:
    """What the calls say of each server; on a narrow terminal the last columns are left out."""

    run: Watched

    def __bool__(self) -> bool:
        return bool(self.run.servers)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = ["", "state", "failed", "answers", "version", "push", "calls", "pushes"]
        unbounded = options.update(width=1000)
        while len(names) > 2:
            if console.measure(self._table(names), options=unbounded).maximum <= options.max_width:
                break
            names.pop()
        yield self._table(names)

    def _table(self, names: Sequence[str]) -> Table:
        columns = [
            Column(name, no_wrap=True, overflow="crop", justify="right" if name else "left")
            for name in names
        ]
        table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for url, server in self.run.servers.items():
            version = "" if server.version is None else str(server.version)
            push = "" if server.push_s is None else f"{server.push_s:.2f} s"
            counts = (str(server.failed), str(server.requests), version, push)
            row = (printable(url), server.state, *counts, str(server.calls), str(server.pushes))
            style = "bold red" if server.state == "lost" else ""
            table.add_row(*map(_text, row[: len(names)]), style=style)
        return table
