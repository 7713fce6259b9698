"""What one optimizer step did, and how long each phase of it took."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from learner.metrics.payload import Payload
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
    """One optimizer step.

    payload: the parts of its numbers that this process has, while the step runs.
    metrics: canonical keys and numbers of all processes, once it is over.
    """

    step: int
    channel: Channel
    samples: int
    payload: Payload = field(default_factory=Payload)
    metrics: dict[str, float] = field(default_factory=dict)
