"""A good plan of a pool too large for the best one (PACK-03).

Segments are their lengths here: which of several equally long ones goes where is no matter.
Pack by pack, one segment opens it and a subset of the others fills it to the total that is
aimed at. Aiming at the average of what is left gives even packs, and mostly as few as the
lower bound; where it does not, packs as full as can be, and first-fit-decreasing, compete.
"""

from collections.abc import Sequence

from learner.packing.bound import fewest_packs
from learner.packing.subset import CLOSE_ENOUGH, subset_of_total

# Lengths in each pack.
Plan = list[list[int]]

# Which segment opens a full pack: its place among those that are left, longest first.
_OPENERS = (0, 1 / 3, 1 / 2)

# An emptiest pack this share of a pack below the average is as good as the average.
_EVEN_ENOUGH = 512


def good_plan(lengths: Sequence[int], capacity: int, filled: int) -> Plan:
    """Few packs, then few under `filled` tokens, then a full emptiest pack."""
    descending = sorted(lengths, reverse=True)
    bound = fewest_packs(lengths, capacity)
    plan = _even_packs(descending, capacity, filled, bound)
    plans = [plan] if plan else _competing_plans(descending, capacity, filled, bound)
    fewest = min(map(len, plans))
    evened_out = [_evened_out(plan, capacity, filled) for plan in plans if len(plan) == fewest]
    return min(evened_out, key=lambda plan: _badness(plan, filled))


def _competing_plans(
    descending: Sequence[int], capacity: int, filled: int, bound: int
) -> list[Plan]:
    """Plans of pools that `bound` even packs do not hold; each is the best of some pools."""
    plans = [_full_packs(descending, capacity, opener) for opener in _OPENERS]
    plans.append(_first_fit(descending, capacity))
    for n_packs in range(bound + 1, min(map(len, plans)) + 1):
        even = _even_packs(descending, capacity, filled, n_packs)
        if even:
            return [*plans, even]
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


def _evened_out(plan: Plan, capacity: int, filled: int) -> Plan:
    """The emptiest pack and another divide their segments anew, as long as that helps."""
    enough = sum(map(sum, plan)) // len(plan) - capacity // _EVEN_ENOUGH
    for _ in plan:
        plan.sort(key=sum)
        if sum(plan[0]) >= enough or not _emptiest_gains(plan, capacity, filled):
            break
    return plan


def _emptiest_gains(plan: Plan, capacity: int, filled: int) -> bool:
    """Improve the first of `plan` and the fullest pack with which that is possible."""
    for k in range(len(plan) - 1, 0, -1):
        pair = [plan[0], plan[k]]
        anew = _divided(plan[0] + plan[k], capacity, filled)
        if _badness(anew, filled) < _badness(pair, filled):
            plan[0], plan[k] = anew
            return True
    return False


def _divided(lengths: list[int], capacity: int, filled: int) -> Plan:
    """Two packs of what two packs hold."""
    left = sorted(lengths, reverse=True)
    pack = subset_of_total(left, _share(sum(left), 2, filled), capacity)
    return [[left.pop(k) for k in reversed(pack)], left]
