"""The run as its files tell it; `look` reads what is new in them."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from learner.checkpoint import checkpoints_in
from learner.config import Config
from learner.process_mark import lives
from learner.resume import METRICS, RUN
from learner.run_folder import RunFolder, total_steps
from learner.watch.events import Event, Events, Found
from learner.watch.tail import Tail
from shared_contracts.errors import ContractError

Numbers = dict[str, Any]
State = Literal["starting", "running", "finished", "gone", "removed"]

# Steps that are kept: more than the widest terminal shows.
_KEPT = 600
_RECENT = 30
_ENOUGH = 5


@dataclass
class Server:
    """What the calls tell of a server. state: of the last thing that happened to it."""

    state: str = "not asked yet"
    calls: int = 0
    requests: int = 0
    failed: int = 0
    pushes: int = 0
    version: int | None = None
    push_s: float | None = None


@dataclass
class _Calls:
    """Of one rollout_calls file: what happened to each server, and what is worth telling.

    It is read from its beginning, as calls are counted.
    """

    tail: Tail
    servers: dict[str, Server] = field(default_factory=lambda: defaultdict(Server))
    fallback: str | None = None
    step: int = 0
    new: list[tuple[int, Event]] = field(default_factory=list)

    def look(self) -> Found:
        """An evaluation is after the step before it in the log; the last one is the newest."""
        more, anew = True, False
        while more:
            new = self.tail.read()
            if new.anew:
                self.servers.clear()
                self.new.clear()
                self.fallback, self.step = None, 0
            for line in new.lines:
                self._take(line)
            more, anew = new.more, anew or new.anew
        found, self.new = self.new, []
        newest = (None, self.step)
        return Found(
            [(math.inf if (e.at, after) == newest else after, e) for after, e in found], anew
        )

    def _note(self, at: int | None, what: str) -> None:
        self.new.append((self.step, Event(at, what)))

    def _take(self, line: Numbers) -> None:
        at = line.get("step")
        self.step = self.step if at is None else at
        for entry in line.get("servers", ()):
            self.servers[entry["base_url"]]  # shown before it is asked
        for url, reason in line.get("lost", ()):
            self.servers[url].state = "lost"
            self._note(at, f"lost {url}: {reason}")
        for push in line.get("pushes", ()):
            self._pushed(push, at)
        for call in line.get("calls", ()):
            self._called(call, at)
        if line.get("sync_fallback") and line["sync_fallback"] != self.fallback:
            self._note(at, f"full weights are pushed: {line['sync_fallback']}")
        self.fallback = line.get("sync_fallback")

    def _pushed(self, push: Numbers, at: int | None) -> None:
        server = self.servers[push["server"]]
        server.state, server.pushes = "serving", server.pushes + 1
        server.version, server.push_s = push["version"], push["seconds"]["total"]
        if push["again"]:
            self._note(at, f"{push['server']} is back and has the weights again")

    def _called(self, call: Numbers, at: int | None) -> None:
        server = self.servers[call["server"]]
        server.calls += 1
        if call["outcome"] == "answered":
            server.requests += call["count"]
            server.state = "serving"
        else:
            server.failed += 1
            said = f"{call['server']}, attempt {call['attempt']}: {call['outcome']}"
            self._note(at, said)


class Watched:
    """A run folder that is looked at again and again. Attributes are of the last look.

    steps: lines of metrics.jsonl with a loss, the last of them. evaluations: those of scores.
    ended: Trainer's own summary, once there is one. started_at: of the process, if it is told.
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
        self._events = Events()
        self._calls: dict[Path, _Calls] = {}
        self._run_json = self._changed_at(RUN)
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_RECENT)

    def look(self) -> list[Numbers]:
        """Read what is new; returns the new lines of metrics.jsonl."""
        self._look_at_facts()
        new = self._metrics.read()
        if new.anew:
            self._forget()
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
        self._events.take({self.path / METRICS: found, **self._look_at_calls()})
        self.checkpoints = list(self._found_checkpoints())
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
    def started(self) -> float | None:
        """When the process that writes the folder began, in seconds since 1970."""
        said = self.facts.get("process", {}).get("started")
        return datetime.fromisoformat(said).timestamp() if said else None

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
                server.calls += seen.calls
                server.requests += seen.requests
                server.failed += seen.failed
                server.pushes += seen.pushes
                server.state = seen.state if server.state != "lost" else server.state
                server.version = seen.version if seen.version is not None else server.version
                server.push_s = seen.push_s if seen.push_s is not None else server.push_s
        return together

    @property
    def events(self) -> list[Event]:
        """Oldest first."""
        return list(self._events)

    def _look_at_facts(self) -> None:
        """Again where the run went on: another process, or another number of steps."""
        changed = self._changed_at(RUN)
        if changed is not None and changed != self._run_json:
            with suppress(ContractError, OSError):  # it is being written: the next look
                folder = RunFolder.open(self.path)
                self.config, self.facts = folder.config(), folder.facts()
                self._run_json = changed

    def _look_at_calls(self) -> dict[Path, Found]:
        there = set(self.path.glob("rollout_calls*.jsonl"))
        self._calls = {path: calls for path, calls in self._calls.items() if path in there}
        for path in sorted(there):
            self._calls.setdefault(path, _Calls(Tail(path, whole=True)))
        return {path: calls.look() for path, calls in self._calls.items()}

    def _forget(self) -> None:
        self.steps.clear()
        self.evaluations.clear()
        self._arrivals.clear()
        self.ended = None

    def _take(self, line: Numbers) -> None:
        self.ended = line if "train_runtime" in line else None
        if "loss" in line and "step" in line:
            self.steps.append(line)
        elif any(key.startswith("eval/") for key in line):
            self.evaluations.append(line)

    def _found_checkpoints(self) -> Iterator[tuple[str, float]]:
        for path in checkpoints_in(self.path):
            with suppress(OSError):  # one that is taken away now
                yield path.name, path.stat().st_mtime

    def _state(self) -> State:
        if self._changed_at(RUN) is None:
            return "removed"
        if self.ended is not None:
            return "finished"
        mark = self.facts.get("process")
        if mark and lives(mark) is False:
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
