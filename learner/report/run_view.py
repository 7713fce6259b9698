"""A run folder as the page looks at it: its lines by what they are, and its steps from 1."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from learner.config import Config
from learner.metrics.step_line import channel_of
from learner.run_folder import RunFolder, total_steps

Line = dict[str, Any]
# (step, value); the value is None where it was not a number.
Point = tuple[int, float | None]


@dataclass(frozen=True)
class RunView:
    """metrics: lines of metrics.jsonl. calls: those of rollout_calls*.jsonl.

    error: what ended the run, where that is known.
    """

    folder: RunFolder
    config: Config
    facts: dict[str, Any]
    metrics: list[Line]
    calls: list[Line]
    error: str | None = None

    @classmethod
    def of(cls, folder: RunFolder, error: str | None = None) -> "RunView":
        return cls(folder, folder.config(), folder.facts(), folder.metrics(), folder.calls(), error)

    @cached_property
    def steps(self) -> list[Line]:
        """A line for each optimizer step that was logged."""
        return [line for line in self.metrics if "loss" in line]

    @cached_property
    def evaluations(self) -> list[Line]:
        return [line for line in self.metrics if "eval/f1" in line]

    @property
    def channels(self) -> str:
        """Which channels it has run: `A`, `B`, `AB`, or nothing yet."""
        ran = {bool(line.get("step/channel_b")) for line in self.steps}
        return ("A" if False in ran else "") + ("B" if True in ran else "")

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.metrics), default=0)

    @property
    def ended(self) -> Line | None:
        """The line that says that training has ended, unless it went on since."""
        last = self.metrics[-1] if self.metrics else {}
        return last if "train_runtime" in last else None

    @property
    def total_steps(self) -> int | None:
        """How many it is to have; None where that cannot be told yet."""
        if self.ended is not None:
            return self.last_step
        return total_steps(self.config, self.steps[-1] if self.steps else None)

    @property
    def replay(self) -> str:
        """The command that builds a step again, without the step."""
        return f"learner replay {shlex.quote(str(self.folder.path.absolute()))}"

    def series(self, key: str, channel: str = "AB") -> list[Point]:
        """The values of a metric in the steps that have it."""
        return points(of_channel(self.steps, channel), key)

    def mean_of_last(self, key: str, count: int = 10) -> float | None:
        values = [value for _, value in self.series(key)[-count:] if value is not None]
        return sum(values) / len(values) if values else None


def points(lines: Sequence[Line], key: str) -> list[Point]:
    return [(line["step"], line[key]) for line in lines if key in line]


def of_channel(lines: Sequence[Line], channel: str) -> list[Line]:
    return [line for line in lines if channel_of(line) in channel]


def keys_below(lines: Sequence[Line], prefix: str) -> list[str]:
    """Keys that begin with `prefix`, in the order in which they appear."""
    return list(dict.fromkeys(key for line in lines for key in line if key.startswith(prefix)))


def numbers(points: Sequence[Point]) -> Iterator[float]:
    return (value for _, value in points if value is not None)
