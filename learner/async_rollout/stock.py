"""The ready shares of one process, between the thread that makes them and the learner.

prefetcher   begin() -> a share's number ... put()
learner      refresh(), has_ready(), then take() for channel B or take_unanswered() for A
"""

import threading
import time
from typing import Any, Generic

from learner.async_rollout.queue import R, ReadyQueue
from learner.async_rollout.shares import Shares
from learner.metrics import Payload
from shared_contracts.errors import RunError


class Stock(Generic[R]):
    """A share is in the queue, being made, with the learner or with nobody.

    target: no share is begun while as many packs are ready (`prefetch_target_packs`), or while
        one of the largest size so far would drop another.
    """

    def __init__(self, shares: Shares, queue: ReadyQueue[R], target: int) -> None:
        self._changed = threading.Condition()
        self._shares = shares
        self._queue = queue
        self._target = target
        self._largest = 1
        self._making: int | None = None
        self._closed = False
        self._dropped_oldest = self._dropped_stale = 0
        self._idle_s = 0.0
        self._idle_since: float | None = None

    def begin(self) -> int | None:
        """The next share to make, as soon as one is wanted; None once the stock is closed."""
        with self._changed:
            self._idle_since = time.perf_counter()
            while not self._closed:
                if self._has_room() and (share := self._shares.claim()) is not None:
                    self._making = share
                    self._count_idle()
                    self._idle_since = None
                    return share
                self._changed.wait()
            return None

    def put(self, ready: R) -> None:
        """Keep a share that was begun, unless the learner has taken it in the meantime."""
        with self._changed:
            if self._making != ready.share:
                return
            self._making = None
            self._largest = max(self._largest, ready.size)
            if self._queue.is_stale(ready):
                self._dropped_stale += self._give_back([ready])
            else:
                self._dropped_oldest += self._give_back(self._queue.put(ready))

    def refresh(self, version: int) -> None:
        """`version` is the newest now; what is too old for it is given back."""
        with self._changed:
            self._dropped_stale += self._give_back(self._queue.drop_stale(version))

    def has_ready(self) -> bool:
        with self._changed:
            return len(self._queue) > 0

    @property
    def packs(self) -> int:
        """That are ready."""
        with self._changed:
            return self._queue.packs

    def take(self, step: int) -> R:
        """What channel B trains on in step `step`."""
        with self._changed:
            ready = self._queue.take(step)
            self._trained(ready.share)
            return ready

    def take_unanswered(self, step: int) -> int:
        """What channel A trains on in step `step`: a share without answers, if there is one.

        At the end of a run there may be none; then answers are left unused.
        """
        with self._changed:
            share = self._shares.claim()
            if share is None and (newest := self._queue.take_newest()) is not None:
                share = newest.share
            if share is None:
                share, self._making = self._making, None
            if share is None:
                raise RunError(f"no share is left for step {step}: {self._queue}")
            self._trained(share)
            return share

    def state(self) -> dict[str, Any]:
        """JSON: the shares that are not trained on yet."""
        with self._changed:
            return self._shares.state()

    def payload(self) -> Payload:
        """What was counted since it was last asked for."""
        with self._changed:
            self._count_idle()
            payload = Payload()
            payload.add(
                {
                    "stage2_ab/async/dropped_oldest": self._dropped_oldest,
                    "stage2_ab/async/dropped_stale": self._dropped_stale,
                }
            )
            payload.note({"stage2_ab/async/prefetch_idle_s": self._idle_s})
            self._dropped_oldest = self._dropped_stale = 0
            self._idle_s = 0.0
            return payload

    def close(self) -> None:
        """No share is begun any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        ready = self._queue.packs
        return ready < self._target and (
            ready == 0 or ready + self._largest <= self._queue.queue_limit
        )

    def _give_back(self, dropped: list[R]) -> int:
        """Returns how many packs that are."""
        for ready in dropped:
            self._shares.give_back(ready.share)
        self._changed.notify_all()
        return sum(ready.size for ready in dropped)

    def _trained(self, share: int) -> None:
        self._shares.trained(share)
        self._changed.notify_all()

    def _count_idle(self) -> None:
        if self._idle_since is not None:
            now = time.perf_counter()
            self._idle_s += now - self._idle_since
            self._idle_since = now
