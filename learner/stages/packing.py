"""The packs of a step: which segments share a forward (section 11 of the contract).

A segment is one whole sample, prompt and target; here only its length counts. Plans are
deterministic and choose among the bins of `binpacking` and of one greedy baseline. A bin holds
lengths; segments of equal length are interchangeable. Imports no torch.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heapreplace
from itertools import chain
from types import ModuleType
from typing import Generic, NamedTuple, Protocol, TypeVar

from learner.config.training import TrainingConfig
from learner.runs.metrics import Payload
from learner.types import Place
from shared_contracts.errors import ContractError


class Whole(Protocol):
    """A whole sample; its length is its tokens."""

    @property
    def sample_id(self) -> str: ...
    def __len__(self) -> int: ...


S = TypeVar("S", bound=Whole)
P = TypeVar("P")

# With less room a pack is full; with more it waits, if the shortest segment would fit.
_MOST_ROOM = 0.15


class Chunk(NamedTuple, Generic[P]):
    """Some packs of a step. last: the step has no more."""

    packs: Sequence[P]
    last: bool


class StepPacker(Generic[S, P]):
    """Divides the segments of one step into packs; no segment is left for the next step.

    With `training.packing: false` every segment is a pack of its own, of any length.

    capacity: tokens of a pack. make: makes a pack of segments.
    """

    def __init__(
        self,
        training: TrainingConfig,
        capacity: int,
        make: Callable[[list[S]], P],
    ) -> None:
        self._packing = training.packing
        self._min_fill = training.packing_min_fill_ratio
        self._capacity = capacity
        self._make = make
        self._waiting: list[tuple[int, S]] = []  # each segment with its number, from 0
        self._come = 0
        self._places: dict[int, Place] = {}
        self._packs = 0
        self._version: int | None = None

    def chunk(self, segments: Sequence[S], *, last: bool, version: int | None = None) -> list[P]:
        """Add a chunk of the step, and return the packs that can be made.

        Before the last chunk, packs are made while the waiting segments have the tokens of a whole
        pack and fill it, so far as they can. With the last chunk, all waiting segments share the
        fewest packs (`plan_packs`).

        version: of the weights that answered. A new one first finishes the packs of the version
        before: no pack mixes two.
        """
        finished: list[P] = []
        if self._version not in (None, version):
            finished = self.chunk([], last=True, version=self._version)
        self._version = version
        numbered = list(enumerate(segments, start=self._come))
        self._come += len(segments)
        packs = self._divide(numbered, last) if self._packing else [[each] for each in numbered]
        for pack in packs:
            for position, (number, segment) in enumerate(pack):
                place = Place(len(segment), self._packs, position, self._come)
                self._places[number] = place
            self._packs += 1
        return finished + [self._make([segment for _, segment in pack]) for pack in packs]

    def _divide(self, numbered: Sequence[tuple[int, S]], last: bool) -> list[list[tuple[int, S]]]:
        for each in numbered:
            check_length(len(each[1]), self._capacity, each[1].sample_id)
        self._waiting += numbered
        if last:
            return self._take(plan_packs(self._lengths(), self._capacity, self._min_fill))
        packs = []
        while sum(lengths := self._lengths()) >= self._capacity:
            plan = select_segments(lengths, self._capacity)
            room = self._capacity - sum(lengths[place] for place in plan)
            if room > _MOST_ROOM * self._capacity and room >= min(lengths):
                break  # a segment of a later chunk may fit
            packs += self._take([plan])
        return packs

    def _lengths(self) -> list[int]:
        return [len(segment) for _, segment in self._waiting]

    def _take(self, plan: Sequence[Sequence[int]]) -> list[list[tuple[int, S]]]:
        packs = [[self._waiting[place] for place in pack] for pack in plan]
        taken = set(chain.from_iterable(plan))
        self._waiting = [each for i, each in enumerate(self._waiting) if i not in taken]
        return packs

    @property
    def places(self) -> list[Place]:
        """The places of all segments, in the order of arrival, after the last chunk (MET-03)."""
        return [self._places[number] for number in range(self._come)]

    def payload(self) -> Payload:
        """The metrics of all packs so far (PACK-05)."""
        payload = Payload()
        tokens = sum(place.length for place in self._places.values())
        room = self._packs * self._capacity
        payload.rate({"packing/post_rollout_fill": (tokens, room)})
        payload.add(
            {
                "packing/post_rollout_segments": len(self._places),
                "packing/post_rollout_packs": self._packs,
                "packing/post_rollout_selected_total_len": tokens,
            }
        )
        return payload


def forwards_due(ready: Sequence[int], over: Sequence[bool], unsynced: bool) -> int:
    """Return the number of forwards that every rank runs after the next chunk of each.

    ready: packs of each rank. over: ranks without further chunks. unsynced: gradients of this step
    are not synchronized yet. The result is the smallest number of packs; after the last chunks of
    all ranks the largest, and at least 1 if gradients must be synchronized.
    """
    return max(*ready, int(unsynced)) if all(over) else min(ready)


def select_segments(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return the indices of the segments for the next pack, in insertion order; [] for [].

    The pack holds the oldest segment (index 0) and at least as many tokens as FIFO-greedy
    packing would. Among that baseline and the bins that `binpacking.to_constant_volume` makes
    beside the oldest, the fullest wins, then the one of fewer segments, then the smallest
    indices. Of equally long segments the older ones go first.

    lengths: tokens of each segment, oldest first. capacity: tokens of a pack.

    Raises ContractError for a segment longer than `capacity`, or without `binpacking`.
    """
    check_lengths(lengths, capacity, "buffer")
    if not lengths:
        return []
    oldest, *others = lengths
    room = capacity - oldest
    fitting = [length for length in others if length <= room]
    bins = binpacking_module().to_constant_volume(fitting, room)
    packs = [_first_come(lengths, capacity), *([oldest, *beside] for beside in bins)]
    best = min(map(_rank, packs))
    return min(segments_of([pack], lengths)[0] for pack in packs if _rank(pack) == best)


def _rank(pack: Sequence[int]) -> tuple[int, int]:
    return -sum(pack), len(pack)


def _first_come(lengths: Sequence[int], capacity: int) -> list[int]:
    """FIFO-greedy: in insertion order, the length of each segment that still fits."""
    taken = []
    for length in lengths:
        if length <= capacity:
            taken.append(length)
            capacity -= length
    return taken


def plan_packs(lengths: Sequence[int], capacity: int, min_fill: float) -> list[list[int]]:
    """Divide a pool into packs, every segment exactly once.

    Candidates are first-fit-decreasing, `binpacking.to_constant_volume`, and evenly filled
    bins (`_even`) of every number from `total / capacity` up to what the better of these two
    needs. The fewest packs win, then the fewest underfilled ones (`total / capacity <
    min_fill`), then the largest smallest fill. Indices ascend within and over the packs.

    lengths: tokens of each segment. capacity: tokens of a pack. min_fill: share of it.

    Raises ContractError for a segment longer than `capacity`, or without `binpacking`.
    """
    check_lengths(lengths, capacity, "pool")
    if not lengths:
        return []
    pool = sorted(lengths, reverse=True)
    plans = [_first_fit(pool, capacity), binpacking_module().to_constant_volume(pool, capacity)]
    least, most = -(-sum(pool) // capacity), min(map(len, plans))
    plans += [_even(pool, count) for count in range(least, most + 1)]

    def badness(plan: Iterable[Iterable[int]]) -> tuple[int, int, int]:
        totals = [sum(pack) for pack in plan]
        underfilled = sum(total / capacity < min_fill for total in totals)
        return len(totals), underfilled, -min(totals)

    fitting = [plan for plan in plans if max(map(sum, plan)) <= capacity]
    return sorted(segments_of(min(fitting, key=badness), lengths))


def _first_fit(descending: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each length into the first bin that has room for it (first-fit-decreasing)."""
    bins: list[list[int]] = []
    for length in descending:
        for packed in bins:
            if sum(packed) + length <= capacity:
                packed.append(length)
                break
        else:
            bins.append([length])
    return bins


def _even(descending: Sequence[int], count: int) -> list[list[int]]:
    """Put each length into the emptiest of `count` bins (longest-processing-time rule)."""
    bins: list[tuple[int, list[int]]] = [(0, []) for _ in range(count)]
    for length in descending:
        total, packed = bins[0]
        heapreplace(bins, (total + length, [*packed, length]))
    return [packed for _, packed in bins]


def binpacking_module() -> ModuleType:
    """Return `binpacking`. Raises ContractError where it is not installed."""
    try:
        import binpacking
    except ImportError:
        raise ContractError(
            "training.packing",
            "the module 'binpacking' is not installed",
            "Install it (pip install binpacking) or set training.packing: false",
        ) from None
    return binpacking


def check_length(length: int, capacity: int, sample_id: str) -> None:
    """Raise `ContractError` for a segment of `length` tokens that no pack can hold."""
    assert length > 0, f"sample {sample_id} has {length} tokens"
    if length > capacity:
        raise ContractError(
            "global_max_length",
            f"sample {sample_id} takes {length} tokens and a pack holds {capacity}",
            "Raise global_max_length, lower rollout_matching.max_new_tokens, "
            "or set training.packing: false",
        )


def check_lengths(lengths: Sequence[int], capacity: int, place: str) -> None:
    """Call `check_length` for each; messages name a segment by its index in `place`."""
    for index, length in enumerate(lengths):
        check_length(length, capacity, f"at index {index} of the {place}")


def segments_of(packs: Iterable[Iterable[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Return the ascending indices of the segments in each pack of lengths.

    Of equally long segments the earlier one goes first.
    """
    waiting = defaultdict[int, deque[int]](deque)
    for index, length in enumerate(lengths):
        waiting[length].append(index)
    return [sorted(waiting[length].popleft() for length in pack) for pack in packs]
