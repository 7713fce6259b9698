"""Which segments share a forward (PACK-01 to PACK-03); lengths in, indices out.

A segment is one whole sample, prompt and target. `plan_packs` divides the pool of a step,
`select_segments` takes one pack out of a buffer that goes on, and `SegmentBuffer` is the
buffer of both.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Generic, TypeVar

from shared_contracts.errors import ContractError

# Up to this many segments the plan is the optimum; see `_Search`.
EXACT_POOL = 12

Packs = list[list[int]]
Segment = TypeVar("Segment")


def check_length(length: int, capacity: int, sample_id: str) -> None:
    """Raise `ContractError` for a segment of `length` tokens that no pack can hold."""
    if length > capacity:
        raise ContractError(
            "global_max_length",
            f"sample {sample_id} takes {length} tokens and a pack holds {capacity}",
            "Raise global_max_length, lower rollout_matching.max_new_tokens, "
            "or set training.packing: false",
        )


# ---- one pack out of a buffer --------------------------------------------------------


def select_segments(lengths: Sequence[int], capacity: int) -> list[int]:
    """Indices of the segments for the next pack, in insertion order; none for none.

    Always holds the oldest segment (index 0), and is at least as full as taking in
    insertion order whatever still fits. Among the bins of `binpacking.to_constant_volume`
    and that baseline the fullest wins, then the one of fewer segments, then the smallest
    indices.
    """
    binpacking = _import_binpacking()
    for index, length in enumerate(lengths):
        check_length(length, capacity, f"at index {index} of the buffer")
    if not lengths:
        return []
    rest = [(i, length) for i, length in enumerate(lengths) if i > 0]
    beside_oldest = [item for item in rest if item[1] <= capacity - lengths[0]]
    bins = binpacking.to_constant_volume(beside_oldest, capacity - lengths[0], weight_pos=1)
    candidates = [sorted([0, *(i for i, _ in items)]) for items in bins]
    candidates.append(_first_come(lengths, capacity))
    return min(candidates, key=lambda c: (-sum(lengths[i] for i in c), len(c), c))


def _first_come(lengths: Sequence[int], capacity: int) -> list[int]:
    """FIFO-greedy: in insertion order, each segment that still fits."""
    taken = []
    for index, length in enumerate(lengths):
        if length <= capacity:
            taken.append(index)
            capacity -= length
    return taken


def _import_binpacking() -> ModuleType:
    try:
        import binpacking
    except ImportError:
        raise ContractError(
            "training.packing",
            "the module 'binpacking' is not installed",
            "Install it (pip install binpacking) or set training.packing: false",
        ) from None
    return binpacking


class SegmentBuffer(Generic[Segment]):
    """Segments of one rank that wait for a pack; what a pack leaves over is carried on.

    capacity: tokens in a pack.
    limit: most segments that may wait (`training.packing_buffer`).
    """

    def __init__(self, capacity: int, limit: int) -> None:
        self._capacity = capacity
        self._limit = limit
        self._waiting: list[tuple[int, Segment]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, segment: Segment, length: int, sample_id: str) -> None:
        """Let a segment wait; `ContractError` if it is too long or the buffer is full."""
        check_length(length, self._capacity, sample_id)
        if len(self._waiting) >= self._limit:
            raise ContractError(
                "training.packing_buffer",
                f"sample {sample_id} comes when {self._limit} segments already wait",
                "Raise training.packing_buffer or lower training.effective_batch_size",
            )
        self._waiting.append((length, segment))

    def take_pack(self) -> list[Segment]:
        """Segments of the next pack, oldest first; they leave the buffer."""
        chosen = select_segments([length for length, _ in self._waiting], self._capacity)
        return [self._waiting.pop(i)[1] for i in reversed(chosen)][::-1]

    def take_pool(self, min_fill: float) -> list[list[Segment]]:
        """All that waits, as the packs of `plan_packs`; the buffer is empty afterwards."""
        waiting, self._waiting = self._waiting, []
        plan = plan_packs([length for length, _ in waiting], self._capacity, min_fill)
        return [[waiting[i][1] for i in pack] for pack in plan]


# ---- the pool of a step --------------------------------------------------------------


def plan_packs(lengths: Sequence[int], capacity: int, min_fill: float) -> Packs:
    """Divide a pool into packs, every segment exactly once; same pool, same plan.

    Fewest packs, then fewest underfilled ones (`total / capacity < min_fill`), then the
    largest smallest fill: the optimum for up to `EXACT_POOL` segments, and never more
    packs than first-fit-decreasing beyond. Indices ascend within and over the packs.
    """
    for index, length in enumerate(lengths):
        check_length(length, capacity, f"at index {index} of the pool")
    if len(lengths) <= EXACT_POOL:
        packs = _Search(lengths, capacity, min_fill).best_plan()
    else:
        packs = _best_heuristic_plan(lengths, capacity, min_fill)
    return sorted(sorted(pack) for pack in packs)


class _Search:
    """Exact search over the sets of segments, as bit masks.

    The pack that holds a set's first segment is tried in every way; what is left is
    solved the same way, once. Underfilled packs add up and the smallest fill is a
    minimum, so the best plan of a set contains the best plan of what is left.
    """

    # (packs, underfilled packs, -smallest total, masks of the packs)
    Plan = tuple[int, int, int, tuple[int, ...]]

    def __init__(self, lengths: Sequence[int], capacity: int, min_fill: float) -> None:
        self._n = len(lengths)
        self._capacity = capacity
        self._min_fill = min_fill
        self._solved: dict[int, _Search.Plan] = {}
        self._totals = [0]
        for length in lengths:
            self._totals += [total + length for total in self._totals]

    def best_plan(self) -> Packs:
        masks = self._solve(2**self._n - 1)[3] if self._n else ()
        return [[i for i in range(self._n) if mask >> i & 1] for mask in masks]

    def _solve(self, segments: int) -> Plan:
        total = self._totals[segments]
        if total <= self._capacity:
            return (1, self._is_underfilled(total), -total, (segments,))
        if segments not in self._solved:
            self._solved[segments] = self._try_first_packs(segments)
        return self._solved[segments]

    def _try_first_packs(self, segments: int) -> Plan:
        best: _Search.Plan | None = None
        first = segments & -segments
        others = beside = segments ^ first
        while beside:
            beside = (beside - 1) & others
            total = self._totals[beside | first]
            left = others ^ beside
            fewest = 1 - (-self._totals[left] // self._capacity)
            if total > self._capacity or (best is not None and fewest > best[0]):
                continue
            packs, underfilled, smallest, masks = self._solve(left)
            plan = (
                1 + packs,
                self._is_underfilled(total) + underfilled,
                max(-total, smallest),
                (beside | first, *masks),
            )
            if best is None or plan[:3] < best[:3]:
                best = plan
        assert best is not None
        return best

    def _is_underfilled(self, total: int) -> bool:
        return total / self._capacity < self._min_fill


def _best_heuristic_plan(lengths: Sequence[int], capacity: int, min_fill: float) -> Packs:
    """The best of first-fit, best-fit and emptiest-first, each in decreasing length."""
    first_fit = _place_decreasing(lengths, capacity, 0, lambda total: 0)
    best_fit = _place_decreasing(lengths, capacity, 0, lambda total: -total)
    fewest = min(len(first_fit), len(best_fit))
    even = _place_decreasing(lengths, capacity, fewest, lambda total: total)

    def badness(packs: Packs) -> tuple[int, int, int]:
        totals = [sum(lengths[i] for i in pack) for pack in packs]
        underfilled = sum(total / capacity < min_fill for total in totals)
        return len(packs), underfilled, -min(totals)

    return min((first_fit, best_fit, even), key=badness)


def _place_decreasing(
    lengths: Sequence[int], capacity: int, n_open: int, preference: Callable[[int], int]
) -> Packs:
    """Longest first, into the open pack of least `preference(total)` that has room.

    n_open: packs that are open from the start; others open when none has room.
    """
    packs: Packs = [[] for _ in range(n_open)]
    totals = [0] * n_open
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        with_room = [k for k, total in enumerate(totals) if total + length <= capacity]
        if not with_room:
            with_room = [len(packs)]
            packs.append([])
            totals.append(0)
        chosen = min(with_room, key=lambda k: (preference(totals[k]), k))
        packs[chosen].append(index)
        totals[chosen] += length
    return packs
