"""The rollout buffer: the batches of an asynchronous run, from their requests to their steps.

    prefetcher   begin() -> a batch's number -> requesting(), for each request -> put()
    learner      refresh(), has_ready(), then take() for channel B or take_unanswered() for A
                 pause() before a push, resume() after it (SYNC-09)

A batch has the samples of one process for one step. It is made, taken, dropped and counted as a
whole. Each batch is trained on exactly once (STEP-02):

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
from typing import TYPE_CHECKING, Any

from learner.config.rollout_matching import AsyncRolloutConfig
from learner.runs.metrics import Payload
from shared_contracts.errors import ContractError, RunError

if TYPE_CHECKING:  # they import torch
    from learner.models.packs import Pack
    from learner.training.synchronous_rollouts import PackFeed


@dataclass(frozen=True)
class ReadyBatch:
    """Batch `batch`, made. version: the oldest that answered. feed: the `PackFeed` of its packs."""

    batch: int
    version: int
    packs: Sequence["Pack"]
    feed: "PackFeed"

    @property
    def size(self) -> int:
        """In packs; at least 1, also if no answer could be used."""
        return max(1, len(self.packs))


class BufferClosed(Exception):
    """No more answers may be requested."""


class RolloutBuffer:
    """A FIFO queue between the thread of a prefetcher and that of a learner.

    At most `queue_limit` packs are ready: a new batch replaces the oldest ones. A batch is stale if
    its weights are more than `version_window` versions older than the newest. No batch is begun
    while `prefetch_target_packs` are ready, or while a batch as large as the largest so far would
    replace another one. A new buffer is paused. total: batches of the run.
    """

    def __init__(self, settings: AsyncRolloutConfig, total: int) -> None:
        self._limit = settings.queue_limit
        self._window = settings.version_window
        self._target = settings.prefetch_target_packs
        self._total = total
        self._changed = threading.Condition()
        self._ready: deque[ReadyBatch] = deque()
        self._newest = 0
        self._largest = 1
        # The first batch that was never begun (None until `start`), those given back, and the one
        # that is being made.
        self._next: int | None = None
        self._returned: list[int] = []
        self._making: int | None = None
        # Packs that were dropped since the last call of `payload`.
        self._dropped = dict.fromkeys(("dropped_oldest", "dropped_stale"), 0)
        self._paused = True
        self._requesting = False
        self._closed = False
        self._idle_s = 0.0
        self._idle_since: float | None = None

    def start(self, first: int) -> None:
        """Begin with batch `first`, or with the restored state."""
        with self._changing():
            self._next = first if self._next is None else self._next

    def state(self) -> dict[str, Any]:
        """Return as JSON the batches that are left: all from `next` on, and those in `left`."""
        with self._changed:
            making = [] if self._making is None else [self._making]
            held = [ready.batch for ready in self._ready]
            return {"next": self._next, "left": sorted([*self._returned, *held, *making])}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; call it before `start`."""
        with self._changing():
            self._next, self._returned = state["next"], sorted(state["left"])

    # --- the prefetcher

    def begin(self) -> int:
        """Wait until a batch is needed, and return its number. Raises BufferClosed."""
        with self._changed:
            self._idle_since = time.perf_counter()
            while not self._closed:
                packs = self.packs
                room = packs + self._largest <= self._limit
                if packs < self._target and room and (batch := self._claim()) is not None:
                    self._count_idle()
                    self._idle_since = None
                    self._making = batch
                    return batch
                self._changed.wait()
            raise BufferClosed

    @contextmanager
    def requesting(self) -> Iterator[None]:
        """Wait while requests are paused. They are not paused again before the block ends.

        Raises BufferClosed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._paused)
            if self._closed:
                raise BufferClosed
            self._requesting = True
        try:
            yield
        finally:
            with self._changing():
                self._requesting = False

    def put(self, ready: ReadyBatch) -> None:
        """Store a batch that was begun, unless the learner has taken it meanwhile.

        Raises ContractError if the batch does not fit into an empty queue.
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
                self._drop(ready, "dropped_stale")
                return
            while self.packs + ready.size > self._limit:
                self._drop(self._ready.popleft(), "dropped_oldest")
            self._ready.append(ready)

    # --- the learner

    def pause(self, *, wait: bool = True) -> None:
        """Start no request. wait: for the running one; False within `requesting`."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not (wait and self._requesting))

    def resume(self) -> None:
        with self._changing():
            self._paused = False

    def close(self) -> None:
        """Begin no more batches and requests. A running request is not waited for."""
        with self._changing():
            self._closed = True

    def refresh(self, version: int) -> None:
        """Note that `version` is the newest, and give stale batches back."""
        with self._changing():
            self._newest = version
            for ready in [ready for ready in self._ready if self._is_stale(ready)]:
                self._ready.remove(ready)
                self._drop(ready, "dropped_stale")

    def has_ready(self) -> bool:
        with self._changed:
            return len(self._ready) > 0

    @property
    def packs(self) -> int:
        """Number of packs that are ready."""
        with self._changed:
            return sum(ready.size for ready in self._ready)

    def take(self, step: int) -> ReadyBatch:
        """Return the oldest batch, for channel B in step `step`.

        Raises RunError if there is none, or it is stale: call `refresh` and `has_ready` first.
        """
        with self._changing():
            if not self._ready or self._is_stale(self._ready[0]):
                found = f"channel B was to run step {step + 1}, and no batch is ready"
                raise RunError(f"{found}: {self}")
            return self._ready.popleft()

    def take_unanswered(self, step: int) -> int:
        """Return a batch without answers, for channel A in step `step`.

        At the end of a run there may be none; then it is a batch whose answers are not used.
        """
        with self._changing():
            batch = self._claim()
            if batch is None and self._ready:
                batch = self._ready.pop().batch
            if batch is None:
                batch, self._making = self._making, None
            if batch is None:
                raise RunError(f"no batch is left for step {step + 1}: {self}")
            return batch

    def payload(self) -> Payload:
        """Return the metrics since the last call."""
        with self._changed:
            self._count_idle()
            payload = Payload()
            payload.add({f"stage2_ab/async/{why}": n for why, n in self._dropped.items()})
            payload.note({"stage2_ab/async/prefetch_idle_s": self._idle_s})
            self._dropped = dict.fromkeys(self._dropped, 0)
            self._idle_s = 0.0
            return payload

    def _count_idle(self) -> None:
        if self._idle_since is not None:
            now = time.perf_counter()
            self._idle_s += now - self._idle_since
            self._idle_since = now

    # --- the state of each batch

    def _claim(self) -> int | None:
        """Return the next batch that is not begun; None if none is left."""
        assert self._next is not None, "start comes first"
        if self._returned:
            return self._returned.pop(0)
        if self._next >= self._total:
            return None
        self._next += 1
        return self._next - 1

    def _drop(self, ready: ReadyBatch, why: str) -> None:
        """Make its batch available again, and count its packs."""
        self._returned = sorted([*self._returned, ready.batch])
        self._dropped[why] += ready.size

    def _is_stale(self, ready: ReadyBatch) -> bool:
        return ready.version < self._newest - self._window

    def __str__(self) -> str:
        """Return its state, for error messages."""
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
        """Notify all waiting threads after the block."""
        with self._changed:
            yield
            self._changed.notify_all()
