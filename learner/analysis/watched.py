"""What is new in the logs of a run, and what a person should know of it; they are only read."""

import json
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from learner.config import Config
from learner.runs.checkpoint import checkpoints_in
from learner.runs.run_folder import METRICS, RUN, RunFolder, is_alive, steps_from_0, total_steps
from shared_contracts.errors import ContractError

Numbers = dict[str, Any]
State = Literal["starting", "running", "finished", "gone", "removed"]

# Bytes that are read of a log at once, and of the end of a log that is long already.
PIECE = 8 * 2**20
_COMPARED = 512
# Steps, and events of each log: more than the largest terminal shows.
_KEPT = 600
_RECENT = 30
_ENOUGH = 5


@dataclass(frozen=True)
class New:
    """What one read of a log found.

    anew: the log was replaced or cut back; `lines` are read from its start. unreadable: lines that
    are no JSON objects. more: there are lines still to be read.
    """

    lines: list[Numbers]
    anew: bool = False
    unreadable: int = 0
    more: bool = False


class Tail:
    """Follows one log of JSON lines, which may grow, be cut back, vanish and come again.

    whole: read a log that is there already from its start, not its end alone.
    """

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path, self._whole = path, whole
        self._inode, self._offset = -1, 0
        self._before = b""  # the last bytes before the offset; if they differ, the log is another

    def read(self) -> New:
        """Read the whole lines since the last call; an unfinished line stays for the next one."""
        try:
            with self._path.open("rb") as file:
                size, inode = file.seek(0, 2), os.fstat(file.fileno()).st_ino
                file.seek(max(0, self._offset - len(self._before)))
                same = inode == self._inode and size >= self._offset
                anew = not same or file.read(len(self._before)) != self._before
                if anew:
                    self._inode, self._before = inode, b""
                    self._offset = 0 if self._whole else max(0, size - PIECE)
                    file.seek(self._offset)
                    if self._offset:
                        self._offset += len(file.readline())
                data = b""
                while len(data) < size - self._offset and b"\n" not in data:
                    piece = file.read(min(PIECE, size - self._offset - len(data)))
                    if not piece:  # it is being cut back
                        break
                    data += piece
        except FileNotFoundError:
            gone = self._inode != -1
            self._inode, self._offset, self._before = -1, 0, b""
            return New([], anew=gone)
        more = b"\n" in data and self._offset + len(data) < size
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._before = (self._before + whole)[-_COMPARED:]
        parsed = [_object(line) for line in whole.splitlines()]
        lines = [line for line in parsed if line is not None]
        return New(lines, anew, unreadable=len(parsed) - len(lines), more=more)


def _object(line: bytes) -> Numbers | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class Event:
    """Something a person should know.

    at: the optimizer step, None for an evaluation. number: from 1 on, as events were found.
    """

    at: int | None
    what: str
    number: int = 0


@dataclass
class Found:
    """What one look at one log found: events, each with the step that it is sorted after."""

    events: list[tuple[float, Event]] = field(default_factory=list)
    anew: bool = False


@dataclass
class Server:
    """A server as the logged calls describe it. state: after the last thing that happened."""

    state: str = "not asked yet"
    calls: int = 0
    requests: int = 0
    failed: int = 0
    pushes: int = 0
    version: int | None = None
    push_s: float | None = None


class _Calls:
    """One rollout_calls file, read from its start: what happened to each server, and events."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, whole=True)
        self._forget()

    def _forget(self) -> None:
        self.servers: dict[str, Server] = defaultdict(Server)
        self._fallback: str | None = None
        self._step = 0
        self._new: list[tuple[int, Event]] = []

    def look(self, from_0: Container[int]) -> Found:
        """An evaluation is after the step before it in the log; the last one is the newest.

        from_0: steps that 0.1.0 has logged, as it counts them.
        """
        more, anew = True, False
        while more:
            new = self._tail.read()
            if new.anew:
                self._forget()
            for line in new.lines:
                at = line.get("step")
                self._take(line, at + 1 if at is not None and at in from_0 else at)
            more, anew = new.more, anew or new.anew
        found, self._new = self._new, []
        last = self._step
        return Found(
            [(math.inf if e.at is None and after == last else after, e) for after, e in found], anew
        )

    def _note(self, at: int | None, what: str) -> None:
        self._new.append((self._step, Event(at, what)))

    def _take(self, line: Numbers, at: int | None) -> None:
        self._step = self._step if at is None else at
        for entry in line.get("servers", ()):
            self.servers[entry["base_url"]]  # shown before it is asked
        for url, reason in line.get("lost", ()):
            self.servers[url].state = "lost"
            self._note(at, f"lost {url}: {reason}")
        for push in line.get("pushes", ()):
            server = self.servers[push["server"]]
            server.state, server.pushes = "serving", server.pushes + 1
            server.version, server.push_s = push["version"], push["seconds"]["total"]
            if push["again"]:
                self._note(at, f"{push['server']} is back and has the weights again")
        for call in line.get("calls", ()):
            server = self.servers[call["server"]]
            server.calls += 1
            if call["outcome"] == "answered":
                server.requests += call["count"]
                server.state = "serving"
            else:
                server.failed += 1
                self._note(at, f"{call['server']}, attempt {call['attempt']}: {call['outcome']}")
        fallback = line.get("sync_fallback")
        if fallback and fallback != self._fallback:
            self._note(at, f"full weights are pushed: {fallback}")
        self._fallback = fallback


class Watched:
    """A run folder that is looked at again and again. Attributes are of the last look.

    steps: lines of metrics.jsonl with a loss, the last of them. evaluations: those of scores.
    ended: Trainer's own summary, once there is one.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.path
        self.config: Config = folder.config()
        self.facts: Numbers = folder.facts()
        self.steps: deque[Numbers] = deque(maxlen=_KEPT)
        self.evaluations: deque[Numbers] = deque(maxlen=_KEPT)
        self.ended: Numbers | None = None
        self.state: State = "starting"
        self.checkpoints: list[tuple[str, float]] = []
        self.last_write: float | None = None
        self._metrics = Tail(self.path / METRICS)
        self._events: dict[Path, deque[Event]] = {}
        self._numbered = 0
        self._calls: dict[Path, _Calls] = {}
        self._from_0 = frozenset[int]()
        self._run_json = self._changed_at(RUN)
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_RECENT)

    def look(self) -> list[Numbers]:
        """Read what is new; returns the new lines of metrics.jsonl."""
        resumed = Found(list(self._look_at_facts()))
        new = self._metrics.read()
        if new.anew:
            for kept in (self.steps, self.evaluations, self._arrivals):
                kept.clear()
            self.ended, self._from_0 = None, steps_from_0(self.path)
        found = Found(anew=new.anew)
        for line in new.lines:
            self._take(line)
            found.events += ((event.at or 0, event) for event in _events_of(line))
        if new.unreadable:
            said = f"{new.unreadable} lines of {METRICS} are no JSON"
            found.events.append((self.step, Event(self.step, said)))
        self.last_write = self._changed_at(METRICS)
        if self.steps and new.lines:
            self._arrivals.append((time.monotonic(), self.step))
        there = set(self.path.glob("rollout_calls*.jsonl"))
        self._calls = {path: calls for path, calls in self._calls.items() if path in there}
        for path in sorted(there):
            self._calls.setdefault(path, _Calls(path))
        calls = {path: calls.look(self._from_0) for path, calls in self._calls.items()}
        self._number({self.path / METRICS: found, self.path / RUN: resumed, **calls})
        self.checkpoints = []
        for path in checkpoints_in(self.path):
            with suppress(OSError):  # one that is being removed
                self.checkpoints.append((path.name, path.stat().st_mtime))
        self.state = self._state()
        return new.lines

    @property
    def step(self) -> int:
        """The last step that is logged, or where the run went on."""
        last = self.steps[-1]["step"] if self.steps else 0
        return max(int(self.facts.get("started_at_step", 0)), int(last))

    @property
    def total(self) -> int | None:
        """Steps of the whole run; None while that is not known."""
        return total_steps(self.config, self.steps[-1] if self.steps else None)

    @property
    def seconds_per_step(self) -> float | None:
        """As seen while watching; before that, what the last steps say they took."""
        if len(self._arrivals) >= _ENOUGH:
            (began, first), (ended, last) = self._arrivals[0], self._arrivals[-1]
            if last > first:
                return (ended - began) / (last - first)
        took = [s["time/step_s"] for s in list(self.steps)[-_RECENT:] if s.get("time/step_s")]
        return sum(took) / len(took) if took else None

    @property
    def seconds_left(self) -> float | None:
        if self.total is None or self.seconds_per_step is None:
            return None
        return max(0, self.total - self.step) * self.seconds_per_step

    @property
    def silent_s(self) -> float | None:
        """Since the last step, if there was one."""
        return None if self.last_write is None else max(0.0, time.time() - self.last_write)

    @property
    def unusually_silent(self) -> bool:
        """Longer than ten steps take, and half a minute."""
        took = [s["time/step_s"] for s in list(self.steps)[-_RECENT:] if s.get("time/step_s")]
        usual = median(took) if took else math.inf
        return self.silent_s is not None and self.silent_s > max(30.0, 10 * usual)

    @property
    def servers(self) -> dict[str, Server]:
        """Those of all processes' calls, added up."""
        together: dict[str, Server] = {}
        for calls in self._calls.values():
            for url, seen in calls.servers.items():
                server = together.setdefault(url, Server())
                for name in ("calls", "requests", "failed", "pushes"):
                    setattr(server, name, getattr(server, name) + getattr(seen, name))
                server.state = seen.state if server.state != "lost" else server.state
                server.version = seen.version if seen.version is not None else server.version
                server.push_s = seen.push_s if seen.push_s is not None else server.push_s
        return together

    @property
    def events(self) -> list[Event]:
        """Oldest first."""
        every = (event for kept in self._events.values() for event in kept)
        return sorted(every, key=lambda event: event.number)

    def _number(self, looks: dict[Path, Found]) -> None:
        """Sort what one look found by step, and number it.

        An event that is found again in a log that was cut back keeps its number.
        """
        former = {log: list(self._events.get(log, ())) for log in looks}
        self._events = {
            log: deque(() if look.anew else former[log], _KEPT) for log, look in looks.items()
        }
        found = [(after, log, event) for log, look in looks.items() for after, event in look.events]
        for _, log, event in sorted(found, key=lambda each: each[0]):
            known = former[log] if looks[log].anew else []
            same = [other for other in known if (other.at, other.what) == (event.at, event.what)]
            if same:
                known.remove(same[0])
            else:
                self._numbered += 1
            number = same[0].number if same else self._numbered
            self._events[log].append(replace(event, number=number))

    def _look_at_facts(self) -> Iterator[tuple[float, Event]]:
        """Again where the run went on: another process, or another number of steps."""
        changed = self._changed_at(RUN)
        if changed is not None and changed != self._run_json:
            with suppress(ContractError, OSError):  # it is being written: the next look
                folder = RunFolder.open(self.path)
                self.config, self.facts = folder.config(), folder.facts()
                self._run_json = changed
                at = int(self.facts.get("started_at_step", 0))
                said = f"resumed at step {at}" if at else "started again from the beginning"
                yield at, Event(at, said)

    def _take(self, line: Numbers) -> None:
        self.ended = line if "train_runtime" in line else None
        if "loss" in line and "step" in line:
            self.steps.append(line)
        elif any(key.startswith("eval/") for key in line):
            self.evaluations.append(line)

    def _state(self) -> State:
        if self._changed_at(RUN) is None:
            return "removed"
        if self.ended is not None:
            return "finished"
        identity = self.facts.get("process")
        if identity and is_alive(identity) is False:
            return "gone"
        return "running" if self.steps else "starting"

    def _changed_at(self, name: str) -> float | None:
        try:
            return (self.path / name).stat().st_mtime
        except OSError:
            return None


def _events_of(line: Numbers) -> Iterator[Event]:
    """What stands out in the numbers of a step."""
    if "loss" not in line or "step" not in line:
        return
    at = line["step"]
    if line["loss"] is None:
        yield Event(at, "the loss is no finite number")
    if ended := line.get("rollout/repeat_terminate_triggered_sequences"):
        yield Event(at, f"{ended:.0f} answers repeated themselves and were ended")
    if left_out := line.get("stage2_ab/channel_b/closure_supervision/N_drop"):
        yield Event(at, f"{left_out:.0f} samples were left out: no readable end")
    if line.get("stage2_ab/async/b_step_skipped_due_to_queue"):
        yield Event(at, "channel A in place of B: no share was ready")
    for kind in ("stale", "oldest"):
        if dropped := line.get(f"stage2_ab/async/dropped_{kind}"):
            yield Event(at, f"{dropped:.0f} packs were dropped ({kind})")
