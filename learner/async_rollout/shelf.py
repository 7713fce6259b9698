"""Which share of one process is made next, kept, dropped and trained on: pure bookkeeping.

begin() -> a share's number ... put()
refresh(), has_ready(), then take() for channel B or take_unanswered() for A
"""

from typing import Any, Generic

from learner.async_rollout.queue import R, ReadyQueue
from learner.async_rollout.shares import Shares
from shared_contracts.errors import RunError


class Shelf(Generic[R]):
    """A share is in the queue, being made, with the learner or with nobody.

    target: no share is begun while as many packs are ready (`prefetch_target_packs`), or while
        one of the largest size so far would drop another.
    dropped_oldest, dropped_stale: packs, since they were last set to 0.
    """

    def __init__(self, shares: Shares, queue: ReadyQueue[R], target: int) -> None:
        self._shares = shares
        self._queue = queue
        self._target = target
        self._largest = 1
        self._making: int | None = None
        self.dropped_oldest = self.dropped_stale = 0

    def begin(self) -> int | None:
        """The next share to make; None while none is wanted, or there is none."""
        if not self._has_room() or (share := self._shares.claim()) is None:
            return None
        self._making = share
        return share

    def put(self, ready: R) -> None:
        """Keep a share that was begun, unless the learner has taken it in the meantime."""
        if self._making != ready.share:
            return
        self._making = None
        self._largest = max(self._largest, ready.size)
        if self._queue.is_stale(ready):
            self.dropped_stale += self._give_back([ready])
        else:
            self.dropped_oldest += self._give_back(self._queue.put(ready))

    def refresh(self, version: int) -> None:
        """`version` is the newest now; what is too old for it is given back."""
        self.dropped_stale += self._give_back(self._queue.drop_stale(version))

    def has_ready(self) -> bool:
        return len(self._queue) > 0

    @property
    def packs(self) -> int:
        """That are ready."""
        return self._queue.packs

    def take(self, step: int) -> R:
        """What channel B trains on in step `step`."""
        ready = self._queue.take(step)
        self._shares.trained(ready.share)
        return ready

    def take_unanswered(self, step: int) -> int:
        """What channel A trains on in step `step`: a share without answers, if there is one.

        At the end of a run there may be none; then answers are left unused.
        """
        share = self._shares.claim()
        if share is None and (newest := self._queue.take_newest()) is not None:
            share = newest.share
        if share is None:
            share, self._making = self._making, None
        if share is None:
            raise RunError(f"no share is left for step {step + 1}: {self._queue}")
        self._shares.trained(share)
        return share

    def state(self) -> dict[str, Any]:
        """JSON: the shares that are not trained on yet."""
        return self._shares.state()

    def _has_room(self) -> bool:
        ready = self._queue.packs
        return ready < self._target and (
            ready == 0 or ready + self._largest <= self._queue.queue_limit
        )

    def _give_back(self, dropped: list[R]) -> int:
        """Returns how many packs that are."""
        for ready in dropped:
            self._shares.give_back(ready.share)
        return sum(ready.size for ready in dropped)
