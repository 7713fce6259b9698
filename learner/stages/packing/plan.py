"""Which segments share a pack. Input: lengths in tokens; output: indices. Deterministic.

select_segments   one pack from a buffer that goes on (PACK-02)
plan_packs        all packs of a pool (PACK-03)

Both choose among the bins of `binpacking` and of one greedy baseline. A bin holds lengths;
segments of equal length are interchangeable, and `segments_of` returns their indices.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from heapq import heapreplace
from types import ModuleType

from shared_contracts.errors import ContractError


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
    """Return a sort key: fuller packs first, then packs of fewer segments."""
    return -sum(pack), len(pack)


def _first_come(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return, in insertion order, the length of each segment that still fits (FIFO-greedy)."""
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
