"""Packs that are ready to be trained on: pure bookkeeping, without threads or torch.

    put      the packs of one share; the oldest shares make room for it
    drop_stale, take      what the next channel-B step may train on, oldest first

A share is what one process trains on in one step; it is taken, dropped and counted whole, as a
step consumes a fixed number of samples (STEP-02).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shared_contracts.errors import ContractError, RunError

P = TypeVar("P")


@dataclass(frozen=True)
class Part(Generic[P]):
    """Packs of answers by one version of the weights, and by no other."""

    version: int
    packs: Sequence[P]


@dataclass(frozen=True)
class ReadyShare(Generic[P]):
    """All packs of share `share`; its parts are in the order of their versions, oldest first."""

    share: int
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


R = TypeVar("R", bound=ReadyShare[Any])


class ReadyQueue(Generic[R]):
    """First in, first out, of at most `queue_limit` packs.

    version_window: a share by weights more versions older than the newest is stale.
    """

    def __init__(self, queue_limit: int, version_window: int) -> None:
        self.queue_limit = queue_limit
        self._window = version_window
        self._shares: deque[R] = deque()
        self._newest = 0

    def __len__(self) -> int:
        """Shares."""
        return len(self._shares)

    @property
    def packs(self) -> int:
        return sum(ready.size for ready in self._shares)

    def put(self, ready: R) -> list[R]:
        """Append a share; returns the oldest ones that were dropped for it.

        Raises ContractError for a share that would not even fit alone.
        """
        self._check(ready)
        if ready.size > self.queue_limit:
            raise ContractError(
                "rollout_matching.async_rollout.queue_limit",
                f"{self.queue_limit}, and the {ready.size} packs of share {ready.share}, which "
                f"one step of a process trains on, do not fit ({self})",
                f"Raise it to at least {ready.size}, or lower training.effective_batch_size",
            )
        dropped = []
        while self.packs + ready.size > self.queue_limit:
            dropped.append(self._shares.popleft())
        self._shares.append(ready)
        return dropped

    def is_stale(self, ready: R) -> bool:
        """Nothing may be trained on it any more."""
        return ready.version < self._newest - self._window

    def drop_stale(self, version: int) -> list[R]:
        """Drop what is too old now that `version` is the newest; returns it."""
        if version < self._newest:
            raise RunError(f"the newest weights are of version {version}, and before: {self}")
        self._newest = version
        stale = [ready for ready in self._shares if self.is_stale(ready)]
        self._shares = deque(ready for ready in self._shares if not self.is_stale(ready))
        return stale

    def take(self, step: int) -> R:
        """The oldest share, for channel-B step `step`.

        Raises RunError when there is none, or it is stale: who asks has looked before.
        """
        if not self._shares:
            raise RunError(f"channel B was to run step {step + 1}, and no share is ready: {self}")
        if self.is_stale(self._shares[0]):
            raise RunError(f"channel B was to run step {step + 1} on a stale share: {self}")
        return self._shares.popleft()

    def take_newest(self) -> R | None:
        """The share that would be trained on last, for other use; None when there is none."""
        return self._shares.pop() if self._shares else None

    def _check(self, ready: R) -> None:
        versions = [part.version for part in ready.parts]
        if not versions or versions != sorted(set(versions)):
            raise RunError(f"share {ready.share} has parts of the versions {versions}: {self}")
        if versions[-1] > self._newest:
            raise RunError(
                f"share {ready.share} was answered by version {versions[-1]}, which nobody has "
                f"pushed: {self}"
            )
        if any(other.share == ready.share for other in self._shares):
            raise RunError(f"share {ready.share} is made twice: {self}")

    def __str__(self) -> str:
        """Its state, for errors."""
        held = ", ".join(
            f"share {ready.share} of version {ready.version} in {ready.size} packs"
            for ready in self._shares
        )
        return (
            f"the queue holds {held or 'nothing'}; newest version {self._newest}, "
            f"version_window {self._window}, queue_limit {self.queue_limit}"
        )
