"""Metrics of one optimizer step; nothing is carried over to the next one."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from learner.types import Channel


class PhaseClock:
    """Seconds spent in each phase of a step, as `time/<phase>_s`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def seconds(self, name: str) -> float:
        return self._seconds[name]

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}


@dataclass
class StepReport:
    """What one optimizer step did. `metrics` maps canonical keys to numbers."""

    step: int
    channel: Channel
    samples: int
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, values: dict[str, float]) -> None:
        """Add up values that come in parts (losses of packs, counts)."""
        for key, value in values.items():
            self.metrics[key] = self.metrics.get(key, 0.0) + value
