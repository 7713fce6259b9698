"""The segments of one step, divided into packs at once or while more are on their way."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from learner.packing.buffer import SegmentBuffer


class Whole(Protocol):
    """A whole sample, as long as its tokens."""

    @property
    def sample_id(self) -> str: ...
    def __len__(self) -> int: ...


S = TypeVar("S", bound=Whole)
P = TypeVar("P")


class Chunk(NamedTuple, Generic[P]):
    """Packs of a step that are there at once. last: the step has no more."""

    packs: Sequence[P]
    last: bool


class StepPacking(Generic[S]):
    """Divides the segments of one step; nothing is carried over to the next one.

    capacity: tokens in a pack. limit: most segments that may wait.
    packing: false makes every segment a pack of its own, however long.
    """

    def __init__(self, capacity: int, limit: int, min_fill: float, *, packing: bool) -> None:
        self._capacity = capacity
        self._min_fill = min_fill
        self._packing = packing
        self._buffer = SegmentBuffer[S](capacity, limit)

    def add(self, segments: Sequence[S]) -> list[list[S]]:
        """Full packs of what there is; the rest waits for more."""
        if not self._packing:
            return [[segment] for segment in segments]
        packs = []
        for segment in segments:
            self._buffer.add(segment, len(segment), segment.sample_id)
            while self._buffer.tokens >= self._capacity:
                packs.append(self._buffer.take_pack())
        return packs

    def rest(self, segments: Sequence[S]) -> list[list[S]]:
        """The last segments, and all that waits, in the fewest packs."""
        if not self._packing:
            return [[segment] for segment in segments]
        for segment in segments:
            self._buffer.add(segment, len(segment), segment.sample_id)
        return self._buffer.take_pool(self._min_fill)


def forwards_due(ready: Sequence[int], over: Sequence[bool], unsynced: bool) -> int:
    """Forwards that every rank runs after another chunk of each.

    ready: packs that each rank holds. over: ranks that will have no more. unsynced: gradients
    of this step wait to be synchronized. As many as all of them have; once all are over, as
    many as the one with the most, and at least the one that synchronizes.
    """
    return max(*ready, int(unsynced)) if all(over) else min(ready)
