"""A good plan of a pool too large for the best one (PACK-03).

Segments are their lengths here: which of several equally long ones goes where is no matter.
Pack by pack, one segment opens it and a subset of the others fills it to the total that is
aimed at. Aiming at the average of what is left gives even packs, and mostly as few as the
lower bound; where it does not, packs as full as can be, and first-fit-decreasing, compete.

The work is bounded: a pack is counted in tokens only while that is cheap, beyond in coarser
units, lengths rounded up.
"""

from collections.abc import Sequence

from learner.packing.bound import fewest_packs
from learner.packing.length import segments_of
from learner.packing.subset import CLOSE_ENOUGH, subset_of_total

# Lengths in each pack.
Plan = list[list[int]]

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
        aim = _share(tokens, n_packs - len(plan), filled)
        if aim > capacity:
            return None
        plan.append(_take_pack(left, capacity, aim, opener=0))
        tokens -= sum(plan[-1])
    return [*plan, left]


def _share(tokens: int, n_packs: int, filled: int) -> int:
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
    aim = _rounded_up(_share(sum(left), 2, filled), units, capacity)
    pack = subset_of_total(in_units, aim, units)
    return [[left.pop(k) for k in reversed(pack)], left]
