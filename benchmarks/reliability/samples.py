"""What processes hold, looked at again and again, and how much of it has grown."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import holdings, name_of, proportional_kib, tree

# The first quarter of a run warms up: caches and the kernels of every size of batch.
WARM_UP = 1 / 4
# The ends that are compared are a sixth each: of an hour, ten minutes.
END = 1 / 6

MIB = 1024


@dataclass(frozen=True)
class Held:
    """What one process holds; `other_files` are open files that are no sockets."""

    rss_mib: float
    pss_mib: float
    threads: int
    sockets: int
    other_files: int


def held_by(root: int, name: str) -> dict[str, Held]:
    """By process of a tree: `NAME`, `NAME engine`, and helpers by number."""
    found: dict[str, Held] = {}
    numbers = count(1)
    for pid in tree(root):
        told = name_of(pid)
        role = "" if pid == root else " engine" if "EngineCore" in told else f" {next(numbers)}"
        found[name + role] = _held(pid)
    return found


def _held(pid: int) -> Held:
    has = holdings(pid)
    sockets = sum(_is_socket(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    return Held(
        rss_mib=has.resident_kib / MIB,
        pss_mib=proportional_kib(pid) / MIB,
        threads=has.threads,
        sockets=sockets,
        other_files=has.files - sockets,
    )


def _is_socket(link: Path) -> bool:
    try:
        return str(link.readlink()).startswith("socket:")
    except FileNotFoundError:  # closed meanwhile
        return False


@dataclass(frozen=True)
class Sample:
    """One look, `seconds` after the load began.

    health: status of `/health/` by server. live_ms, infer_ms: since the look before.
    counts: of calls by kind, since the beginning. pushes: since the beginning.
    """

    seconds: float
    held: dict[str, Held]
    health: dict[str, int]
    live_ms: tuple[float, ...]
    infer_ms: tuple[float, ...]
    counts: dict[str, int]
    pushes: int

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, line: dict[str, Any]) -> "Sample":
        return cls(**line | {"held": {name: Held(**has) for name, has in line["held"].items()}})


@dataclass(frozen=True)
class Growth:
    """Of one figure after the warm-up: its first and last median, and a line through it all.

    slope_percent: what the least-squares line rises from its beginning to its end, in percent of
        where it begins. medians_percent: the last median over the first.
    """

    first: float
    last: float
    slope_percent: float

    @property
    def medians_percent(self) -> float:
        return 100 * (self.last / self.first - 1) if self.first else 0.0


def growth(times: Sequence[float], values: Sequence[float]) -> Growth:
    """Of `values` at `times`, in seconds since the beginning; the warm-up is left out."""
    end = max(times)
    begin = WARM_UP * end
    kept = [(t, v) for t, v in zip(times, values, strict=True) if t >= begin]
    slope, at_zero = np.polyfit([t for t, _ in kept], [v for _, v in kept], deg=1)
    start = at_zero + slope * begin
    return Growth(
        first=statistics.median(v for t, v in kept if t <= begin + END * end),
        last=statistics.median(v for t, v in kept if t >= end - END * end),
        slope_percent=100 * slope * (end - begin) / start if start else 0.0,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")
