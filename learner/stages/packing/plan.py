"""Which segments share a pack: lengths in, indices out; same lengths, same packs.

select_segments   one pack out of a buffer that goes on (PACK-02)
plan_packs        a whole pool (PACK-03): `best_plan` of a small one, `good_plan` of a large one

Inside of a plan segments are their lengths: which of several equally long ones goes where is no
matter, and `segments_of` gives them back.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt

from shared_contracts.errors import ContractError

# The largest pool of which all divisions are looked at.
EXACT_POOL = 12

# Lengths in each pack.
Plan = list[list[int]]


def select_segments(lengths: Sequence[int], capacity: int) -> list[int]:
    """Indices of the segments for the next pack, in insertion order; none for none.

    Always holds the oldest segment (index 0), and is at least as full as taking in
    insertion order whatever still fits. Among that baseline and the bins that
    `binpacking.to_constant_volume` makes beside the oldest, the fullest wins, then the one
    of fewer segments, then the smallest indices. Of equally long segments the older go first.
    """
    binpacking = _import_binpacking()
    check_lengths(lengths, capacity, "buffer")
    if not lengths:
        return []
    oldest, *others = lengths
    room = capacity - oldest
    bins = binpacking.to_constant_volume([length for length in others if length <= room], room)
    packs = [_first_come(lengths, capacity), *([oldest, *beside] for beside in bins)]
    best = min(map(_rank, packs))
    return min(segments_of([pack], lengths)[0] for pack in packs if _rank(pack) == best)


def _rank(pack: Sequence[int]) -> tuple[int, int]:
    """Fuller before emptier, then fewer segments before more."""
    return -sum(pack), len(pack)


def _first_come(lengths: Sequence[int], capacity: int) -> list[int]:
    """FIFO-greedy: in insertion order, the length of each segment that still fits.

    Going on after one that does not fit takes all that stopping there would take, so this
    is the stronger of the two stats of the baseline.
    """
    taken = []
    for length in lengths:
        if length <= capacity:
            taken.append(length)
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


def plan_packs(lengths: Sequence[int], capacity: int, min_fill: float) -> list[list[int]]:
    """Divide a pool into packs, every segment exactly once; same pool, same plan.

    Fewest packs, then fewest underfilled ones (`total / capacity < min_fill`), then the
    largest smallest fill: the optimum for up to `EXACT_POOL` segments; beyond, close to it
    and never more packs than first-fit-decreasing. Indices ascend within and over the packs.

    Time beyond `EXACT_POOL` grows at most with segments**2 * capacity, up to about a second
    for some 1,000 segments. There packs are counted in coarser units, so that a larger
    capacity takes no longer, and more segments cost their square. A logarithm of how far the
    lower bound falls short comes on top of either.
    """
    assert 0 <= min_fill <= 1, min_fill
    check_lengths(lengths, capacity, "pool")
    filled = bisect_left(range(capacity), min_fill, key=lambda total: total / capacity)
    plan = best_plan if len(lengths) <= EXACT_POOL else good_plan
    return sorted(segments_of(plan(lengths, capacity, filled), lengths))


# ---- the best plan of a small pool -----------------------------------------------------------
#
# Sets of segments are bit masks: segment k is bit k. The best plan of a set has one pack
# that holds the set's last segment, and beside it the best plan of what is left. So the
# sets whose last segment is k are solved from those of the segments before it, all of them
# at once: some 3**11 / 2 pairs of a pack and a rest for 12 segments.

# A score is one number, the least is the best: packs, underfilled packs, and in the low
# bits how far the emptiest pack is from full.
Scores = npt.NDArray[np.int64]
_EMPTIEST = (1 << 40) - 1
_UNDERFILLED = 1 << 40
_PACK = 1 << 48
_TOO_LONG = 1 << 54


def best_plan(lengths: Sequence[int], capacity: int, filled: int) -> list[list[int]]:
    """Lengths in each pack: fewest packs, then fewest under `filled` tokens, then the
    fullest emptiest pack.
    """
    n = len(lengths)
    as_one = _scores_as_one_pack(lengths, capacity, filled)
    best = np.zeros(1, np.int64)
    for last in range(n - 1):
        best = np.concatenate([best, _best_divisions(as_one[1 << last : 2 << last], best)])
    packs, left = [], (1 << n) - 1
    while left:
        pack = _best_pack(left, as_one, best)
        packs.append([length for k, length in enumerate(lengths) if pack >> k & 1])
        left ^= pack
    return packs


def _scores_as_one_pack(lengths: Sequence[int], capacity: int, filled: int) -> Scores:
    """Score of each set as one pack, shape (2**n,)."""
    totals = np.zeros(1, np.int64)
    for length in lengths:
        totals = np.concatenate([totals, totals + length])
    scores: Scores = _PACK + _UNDERFILLED * (totals < filled) + capacity - totals
    scores[totals > capacity] = _TOO_LONG
    return scores


def _add(some: Scores, more: Scores) -> Scores:
    """Score of the packs of both: counts add up, the emptier of the emptiest stays."""
    emptiest: Scores = np.maximum(some & _EMPTIEST, more & _EMPTIEST)
    return (some & ~_EMPTIEST) + (more & ~_EMPTIEST) + emptiest


def _best_divisions(pack: Scores, rest: Scores) -> Scores:
    """For each set the least of pack[a] + rest[b] over its divisions into a and b.

    Shapes (2**k,). Segment by segment: it is in neither, in the pack, or in the rest.
    """
    segments = len(rest).bit_length() - 1
    pack, rest = pack[None], rest[None]
    for _ in range(segments):
        pack_without, pack_with = np.split(pack, 2, axis=1)
        rest_without, rest_with = np.split(rest, 2, axis=1)
        pack = np.concatenate([pack_without, pack_with, pack_without])
        rest = np.concatenate([rest_without, rest_without, rest_with])
    best = _add(pack, rest)
    for _ in range(segments):
        neither, in_pack, in_rest = np.split(best, 3)
        best = np.concatenate([neither, np.minimum(in_pack, in_rest)], axis=1)
    return best.ravel()


def _best_pack(segments: int, as_one: Scores, best: Scores) -> int:
    """The pack that holds the last of `segments` in their best plan."""
    last = 1 << (segments.bit_length() - 1)
    others = segments ^ last
    beside = np.arange(last)
    beside = beside[beside & ~others == 0]
    scores = _add(as_one[last | beside], best[others ^ beside])
    return last | int(beside[np.argmin(scores)])


# ---- a good plan of a large pool -------------------------------------------------------------
#
# Pack by pack, one segment opens it and a subset of the others fills it to the total that is
# aimed at. Aiming at the average of what is left gives even packs, and mostly as few as the
# lower bound; where it does not, packs as full as can be, and first-fit-decreasing, compete.
#
# The work is bounded: a pack is counted in tokens only while that is cheap, beyond in coarser
# units, lengths rounded up.

# A total this share of the room above what was asked for is as good as the exact one.
CLOSE_ENOUGH = 2048

# Which segment opens a full pack: its place among those that are left, longest first.
_OPENERS = (0, 1 / 3, 1 / 2)

# An emptiest pack this share of a pack below the average is as good as the average.
_EVEN_ENOUGH = 512

# A search of all packs takes at most so many bit operations ...
_WORK = 1 << 31

# ... unless a pack would be counted in fewer units than these: that is too coarse.
_FEWEST_UNITS = 2_520

# Two packs are divided anew in at most so many units of a pack.
_UNITS_OF_TWO = 16_380

# Halves to sixths of a pack are a whole number of units.
_WHOLE_SHARES = 60


def good_plan(lengths: Sequence[int], capacity: int, filled: int) -> Plan:
    """Few packs, then few under `filled` tokens, then a full emptiest pack."""
    descending = sorted(lengths, reverse=True)
    bound = fewest_packs(lengths, capacity)
    plans = _searched_plans(descending, capacity, filled, bound)
    if all(len(plan) > bound for plan in plans):
        plans.append(_first_fit(descending, capacity))
    fewest = min(map(len, plans))
    plans = [plan for plan in plans if len(plan) == fewest]
    evened_out = [_evened_out(plan, capacity, filled, _WORK // len(plans)) for plan in plans]
    return min(evened_out, key=lambda plan: _badness(plan, filled))


def _searched_plans(
    descending: Sequence[int], capacity: int, filled: int, bound: int
) -> list[Plan]:
    """`_plans_of_units`, in tokens or, where that takes too long, in units of a pack."""
    units = _units(capacity, len(descending) * bound)
    if units == capacity:
        return _plans_of_units(descending, capacity, filled, bound)
    in_units = [_rounded_up(length, units, capacity) for length in descending]
    plans = _plans_of_units(in_units, units, _rounded_up(filled, units, capacity), bound)
    packs = [segments_of(plan, in_units) for plan in plans]
    return [[[descending[k] for k in pack] for pack in plan] for plan in packs]


def _units(capacity: int, searched: int) -> int:
    """In how many units to count a pack: tokens, or fewer units than that if `searched`
    lengths, all packs together, would take too long. Most simple shares of a pack are whole.
    """
    allowed = max(_FEWEST_UNITS, _WORK // searched)
    return min(capacity, allowed - allowed % _WHOLE_SHARES)


def _rounded_up(tokens: int, units: int, capacity: int) -> int:
    """Tokens in units of a pack. What fits by its units fits by its tokens."""
    return -(-tokens * units // capacity)


def _plans_of_units(
    descending: Sequence[int], capacity: int, filled: int, bound: int
) -> list[Plan]:
    """`bound` even packs; where they do not hold the pool, plans that are each the best of
    some pools. Even packs are then as few as bisection finds.
    """
    even = _even_packs(descending, capacity, filled, bound)
    if even:
        return [even]
    plans = [_full_packs(descending, capacity, opener) for opener in _OPENERS]
    low, high = bound + 1, min(map(len, plans))
    while low <= high:
        n_packs = (low + high) // 2
        even = _even_packs(descending, capacity, filled, n_packs)
        if even:
            plans.append(even)
            high = n_packs - 1
        else:
            low = n_packs + 1
    return plans


def _badness(plan: Plan, filled: int) -> tuple[int, int, int]:
    totals = [sum(pack) for pack in plan]
    return len(plan), sum(total < filled for total in totals), -min(totals)


def _even_packs(descending: Sequence[int], capacity: int, filled: int, n_packs: int) -> Plan | None:
    """At most `n_packs` packs that share the total evenly; None if that fails."""
    left, plan = list(descending), Plan()
    tokens = sum(left)
    while tokens > capacity:
        aim = _even_part(tokens, n_packs - len(plan), filled)
        if aim > capacity:
            return None
        plan.append(_take_pack(left, capacity, aim, opener=0))
        tokens -= sum(plan[-1])
    return [*plan, left]


def _even_part(tokens: int, n_packs: int, filled: int) -> int:
    """What the next of `n_packs` should hold so that few are under `filled` tokens."""
    even = -(-tokens // n_packs)
    return filled if even < filled <= tokens else even


def _full_packs(descending: Sequence[int], capacity: int, opener: float) -> Plan:
    """Each pack as full as the segments that are left can make it."""
    left, plan = list(descending), Plan()
    tokens = sum(left)
    aim = capacity - capacity // CLOSE_ENOUGH
    while tokens > capacity:
        plan.append(_take_pack(left, capacity, aim, int(opener * len(left))))
        tokens -= sum(plan[-1])
    return [*plan, left]


def _take_pack(left: list[int], capacity: int, aim: int, opener: int) -> list[int]:
    """A pack of `aim` tokens or little more, or else the fullest below; leaves `left`."""
    pack = [left.pop(opener)]
    filling = subset_of_total(left, max(0, aim - pack[0]), capacity - pack[0])
    return pack + [left.pop(k) for k in reversed(filling)]


def _first_fit(descending: Sequence[int], capacity: int) -> Plan:
    plan, room = Plan(), list[int]()
    for length in descending:
        k = next((k for k, tokens in enumerate(room) if length <= tokens), len(plan))
        if k == len(plan):
            plan.append([])
            room.append(capacity)
        plan[k].append(length)
        room[k] -= length
    return plan


def _evened_out(plan: Plan, capacity: int, filled: int, work: int) -> Plan:
    """The emptiest pack and the fullest with which that helps divide their segments anew,
    again and again, for about `work` bit operations.
    """
    segments_of_two = 2 * sum(map(len, plan)) // len(plan)
    enough = sum(map(sum, plan)) // len(plan) - capacity // _EVEN_ENOUGH
    plan.sort(key=sum)
    k = len(plan)
    for _ in range(work // (segments_of_two * min(capacity, _UNITS_OF_TWO))):
        k -= 1
        if k == 0 or sum(plan[0]) >= enough:
            break
        if _divide_anew(plan, k, capacity, filled):
            plan.sort(key=sum)
            k = len(plan)
    return plan


def _divide_anew(plan: Plan, k: int, capacity: int, filled: int) -> bool:
    """The first of `plan` and pack k, if that makes the two better; whether it does."""
    anew = _divided(plan[0] + plan[k], capacity, filled)
    better = _badness(anew, filled) < _badness([plan[0], plan[k]], filled)
    if not better or sum(anew[1]) > capacity:
        return False
    plan[0], plan[k] = anew
    return True


def _divided(lengths: list[int], capacity: int, filled: int) -> Plan:
    """Two packs of what two packs hold; the second may be too long by rounding."""
    left = sorted(lengths, reverse=True)
    units = min(capacity, _UNITS_OF_TWO)
    in_units = [_rounded_up(length, units, capacity) for length in left]
    aim = _rounded_up(_even_part(sum(left), 2, filled), units, capacity)
    pack = subset_of_total(in_units, aim, units)
    return [[left.pop(k) for k in reversed(pack)], left]


def subset_of_total(lengths: Sequence[int], at_least: int, at_most: int) -> list[int]:
    """Indices of lengths whose total is the smallest in [at_least, at_most].

    If there is none, those of the largest total below. Earlier lengths are preferred: the
    search takes one more at a time and ends at the first total that is close enough
    (`CLOSE_ENOUGH`), so that later ones remain for others.

    The totals of all subsets are the bits of one integer: bit `at_most - total` is set.
    """
    spare = at_most - at_least
    close = min(spare, at_most // CLOSE_ENOUGH)
    wanted = ((2 << close) - 1) << (spare - close)
    reached = 1 << at_most
    before = []
    for length in lengths:
        if reached & wanted:
            break
        before.append(reached)
        reached |= reached >> length
    enough = reached & ((2 << spare) - 1)
    bit = enough.bit_length() - 1 if enough else (reached & -reached).bit_length() - 1
    return _taken(lengths, before, bit)


def _taken(lengths: Sequence[int], before: list[int], bit: int) -> list[int]:
    """Which lengths lead to `bit`: those without which it was not reached."""
    taken = []
    for index in range(len(before) - 1, -1, -1):
        if not before[index] >> bit & 1:
            taken.append(index)
            bit += lengths[index]
    return taken[::-1]


def fewest_packs(lengths: Sequence[int], capacity: int) -> int:
    """The bound L2 of Martello and Toth (Knapsack Problems, 1990, section 8.3).

    No two segments over half a pack share one. Beside those that leave room for `limit`
    tokens go segments of `limit` tokens up to half a pack; what they cannot take needs
    packs of its own. The least limit alone asks for ceil(total / capacity) or more.
    """
    long = sorted(length for length in lengths if 2 * length > capacity)
    short = sorted((length for length in lengths if 2 * length <= capacity), reverse=True)
    bound, with_room, room, to_place = len(long), 0, 0, 0
    for limit in short:
        to_place += limit
        while with_room < len(long) and long[with_room] + limit <= capacity:
            room += capacity - long[with_room]
            with_room += 1
        bound = max(bound, len(long) - (room - to_place) // capacity)
    return bound


# ---- lengths ----------------------------------------------------------------------------------


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
    """`check_length` for each; the samples are named by their index in `place`."""
    for index, length in enumerate(lengths):
        check_length(length, capacity, f"at index {index} of the {place}")


def segments_of(packs: Iterable[Iterable[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Ascending indices into `lengths` for the lengths in each pack.

    Of equally long segments the earlier one goes first.
    """
    waiting = defaultdict[int, deque[int]](deque)
    for index, length in enumerate(lengths):
        waiting[length].append(index)
    return [sorted(waiting[length].popleft() for length in pack) for pack in packs]
