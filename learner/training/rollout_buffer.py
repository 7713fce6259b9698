"""The rollout buffer: which batch of a run is made next, kept, dropped and trained on.

    prefetcher   begin() -> a batch's number ... put()
    learner      refresh(), has_ready(), then take() for channel B or take_unanswered() for A

A batch is what one process trains on in one step; it is made, taken, dropped and counted whole, as
a step consumes a fixed number of samples. Every batch is trained on exactly once (STEP-02):

    unclaimed -> being made or ready -> trained on
        ^                  |
        +--- given back ---+

Imports no torch.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from learner.runs.metrics import Payload
from learner.stages.packing import Part
from shared_contracts.errors import ContractError, RunError

P = TypeVar("P")


@dataclass(frozen=True)
class ReadyBatch(Generic[P]):
    """All packs of batch `batch`; its parts are in the order of their versions, oldest first."""

    batch: int
    parts: Sequence[Part[P]]

    @property
    def version(self) -> int:
        """The oldest that answered."""
        return self.parts[0].version

    @property
    def packs(self) -> list[P]:
        return [pack for part in self.parts for pack in part.packs]

    @property
    def size(self) -> int:
        """In packs; one that has none, as no answer could be used, takes the place of one."""
        return max(1, sum(len(part.packs) for part in self.parts))


R = TypeVar("R", bound=ReadyBatch[Any])


class RolloutBuffer(Generic[R]):
    """First in, first out, for the threads of a prefetcher and a learner.

    queue_limit: most packs that are ready; the oldest batches make room for a new one.
    version_window: a batch by weights more versions older than the newest is stale.
    target: no batch is begun while as many packs are ready (`prefetch_target_packs`), or while
        one of the largest size so far would drop another.
    total: batches of the run. first: those before it are trained on already, unless they are
        `returned`; None until `start`.
    dropped_oldest, dropped_stale: packs, since `payload` was last asked for.
    """

    def __init__(self, queue_limit: int, version_window: int, target: int, total: int) -> None:
        self._limit = queue_limit
        self._window = version_window
        self._target = target
        self._total = total
        self._changed = threading.Condition()
        self._ready: deque[R] = deque()
        self._newest = 0
        self._largest = 1
        # Who has which batch.
        self._next: int | None = None
        self._returned: list[int] = []
        self._claimed: set[int] = set()
        self._making: int | None = None
        self.dropped_oldest = self.dropped_stale = 0
        self._closed = False
        self._idle_s = 0.0
        self._idle_since: float | None = None

    def start(self, first: int) -> None:
        """Begin with batch `first`; a restored buffer goes on from its state."""
        with self._changing():
            self._next = first if self._next is None else self._next

    def state(self) -> dict[str, Any]:
        """JSON: from which on all batches, and which ones before, are not trained on yet."""
        with self._changed:
            return {"next": self._next, "left": sorted([*self._returned, *self._claimed])}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`, before `start`."""
        with self._changing():
            self._next, self._returned = state["next"], sorted(state["left"])

    # --- the prefetcher

    def begin(self) -> int | None:
        """The next batch to make, as soon as one is wanted; None once the buffer is closed."""
        with self._changed:
            self._idle_since = time.perf_counter()
            while not self._closed:
                packs = self.packs
                room = packs == 0 or packs + self._largest <= self._limit
                if packs < self._target and room and (batch := self._claim()) is not None:
                    self._count_idle()
                    self._idle_since = None
                    self._making = batch
                    return batch
                self._changed.wait()
            return None

    def put(self, ready: R) -> None:
        """Keep a batch that was begun, unless the learner has taken it in the meantime.

        Raises ContractError for a batch that would not even fit alone.
        """
        with self._changing():
            if self._making != ready.batch:
                return
            if ready.size > self._limit:
                raise ContractError(
                    "rollout_matching.async_rollout.queue_limit",
                    f"{self._limit}, and the {ready.size} packs of batch {ready.batch}, which "
                    f"one step of a process trains on, do not fit ({self})",
                    f"Raise it to at least {ready.size}, or lower training.effective_batch_size",
                )
            self._making = None
            self._largest = max(self._largest, ready.size)
            if self._is_stale(ready):
                self.dropped_stale += self._give_back(ready)
                return
            while self.packs + ready.size > self._limit:
                self.dropped_oldest += self._give_back(self._ready.popleft())
            self._ready.append(ready)

    def close(self) -> None:
        """Begin no batch any more."""
        with self._changing():
            self._closed = True

    # --- the learner

    def refresh(self, version: int) -> None:
        """Note that `version` is the newest; what is too old for it is given back."""
        with self._changing():
            self._newest = version
            for ready in [ready for ready in self._ready if self._is_stale(ready)]:
                self._ready.remove(ready)
                self.dropped_stale += self._give_back(ready)

    def has_ready(self) -> bool:
        with self._changed:
            return len(self._ready) > 0

    @property
    def packs(self) -> int:
        """That are ready."""
        with self._changed:
            return sum(ready.size for ready in self._ready)

    def take(self, step: int) -> R:
        """What channel B trains on in step `step`: the oldest batch.

        Raises RunError when there is none, or it is stale: `has_ready` and `refresh` come first.
        """
        with self._changing():
            if not self._ready:
                raise RunError(
                    f"channel B was to run step {step + 1}, and no batch is ready: {self}"
                )
            if self._is_stale(self._ready[0]):
                raise RunError(f"channel B was to run step {step + 1} on a stale batch: {self}")
            ready = self._ready.popleft()
            self._claimed.remove(ready.batch)
            return ready

    def take_unanswered(self, step: int) -> int:
        """What channel A trains on in step `step`: a batch without answers, if there is one.

        At the end of a run there may be none; then answers are left unused.
        """
        with self._changing():
            batch = self._claim()
            if batch is None and self._ready:
                batch = self._ready.pop().batch
            if batch is None:
                batch, self._making = self._making, None
            if batch is None:
                raise RunError(f"no batch is left for step {step + 1}: {self}")
            self._claimed.remove(batch)
            return batch

    def payload(self) -> Payload:
        """What was counted since it was last asked for."""
        with self._changed:
            self._count_idle()
            payload = Payload()
            payload.add(
                {
                    "stage2_ab/async/dropped_oldest": self.dropped_oldest,
                    "stage2_ab/async/dropped_stale": self.dropped_stale,
                }
            )
            payload.note({"stage2_ab/async/prefetch_idle_s": self._idle_s})
            self.dropped_oldest = self.dropped_stale = 0
            self._idle_s = 0.0
            return payload

    # --- who has which batch

    def _claim(self) -> int | None:
        """The first batch that nobody has; None when none is left."""
        assert self._next is not None, "start comes first"
        if self._returned:
            batch = self._returned.pop(0)
        elif self._next < self._total:
            batch, self._next = self._next, self._next + 1
        else:
            return None
        self._claimed.add(batch)
        return batch

    def _give_back(self, ready: R) -> int:
        """Let another step have its batch; returns how many packs are lost."""
        self._claimed.remove(ready.batch)
        self._returned = sorted([*self._returned, ready.batch])
        return ready.size

    # --- what may be kept

    def _is_stale(self, ready: R) -> bool:
        return ready.version < self._newest - self._window

    def __str__(self) -> str:
        """Its state, for errors."""
        held = ", ".join(
            f"batch {ready.batch} of version {ready.version} in {ready.size} packs"
            for ready in self._ready
        )
        return (
            f"the queue holds {held or 'nothing'}; newest version {self._newest}, "
            f"version_window {self._window}, queue_limit {self._limit}"
        )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Wake every waiting thread after the block."""
        with self._changed:
            yield
            self._changed.notify_all()

    def _count_idle(self) -> None:
        if self._idle_since is not None:
            now = time.perf_counter()
            self._idle_s += now - self._idle_since
            self._idle_since = now
