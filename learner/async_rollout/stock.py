"""The shelf of one process, between the thread that makes shares and the learner.

prefetcher   begin() -> a share's number ... put()
learner      refresh(), has_ready(), then take() for channel B or take_unanswered() for A
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic

from learner.async_rollout.queue import R, ReadyQueue
from learner.async_rollout.shares import Shares
from learner.async_rollout.shelf import Shelf
from learner.metrics import Payload


class Stock(Generic[R]):
    """A `Shelf` for two threads, which counts what was dropped and how long nothing was made."""

    def __init__(self, shares: Shares, queue: ReadyQueue[R], target: int) -> None:
        self._changed = threading.Condition()
        self._shelf = Shelf(shares, queue, target)
        self._closed = False
        self._idle_s = 0.0
        self._idle_since: float | None = None

    def begin(self) -> int | None:
        """The next share to make, as soon as one is wanted; None once the stock is closed."""
        with self._changed:
            self._idle_since = time.perf_counter()
            while not self._closed:
                if (share := self._shelf.begin()) is not None:
                    self._count_idle()
                    self._idle_since = None
                    return share
                self._changed.wait()
            return None

    def put(self, ready: R) -> None:
        """Keep a share that was begun, unless the learner has taken it in the meantime."""
        with self._changing():
            self._shelf.put(ready)

    def refresh(self, version: int) -> None:
        """`version` is the newest now; what is too old for it is given back."""
        with self._changing():
            self._shelf.refresh(version)

    def has_ready(self) -> bool:
        with self._changed:
            return self._shelf.has_ready()

    @property
    def packs(self) -> int:
        """That are ready."""
        with self._changed:
            return self._shelf.packs

    def take(self, step: int) -> R:
        """What channel B trains on in step `step`."""
        with self._changing():
            return self._shelf.take(step)

    def take_unanswered(self, step: int) -> int:
        """What channel A trains on in step `step`; see `Shelf`."""
        with self._changing():
            return self._shelf.take_unanswered(step)

    def state(self) -> dict[str, Any]:
        """JSON: the shares that are not trained on yet."""
        with self._changed:
            return self._shelf.state()

    def payload(self) -> Payload:
        """What was counted since it was last asked for."""
        with self._changed:
            self._count_idle()
            payload = Payload()
            payload.add(
                {
                    "stage2_ab/async/dropped_oldest": self._shelf.dropped_oldest,
                    "stage2_ab/async/dropped_stale": self._shelf.dropped_stale,
                }
            )
            payload.note({"stage2_ab/async/prefetch_idle_s": self._idle_s})
            self._shelf.dropped_oldest = self._shelf.dropped_stale = 0
            self._idle_s = 0.0
            return payload

    def close(self) -> None:
        """No share is begun any more."""
        with self._changing():
            self._closed = True

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Whoever waits looks again after the block."""
        with self._changed:
            yield
            self._changed.notify_all()

    def _count_idle(self) -> None:
        if self._idle_since is not None:
            now = time.perf_counter()
            self._idle_s += now - self._idle_since
            self._idle_since = now
