"""The pool of a step, divided into packs (PACK-03)."""

from bisect import bisect_left
from collections.abc import Sequence

from learner.packing.exact import EXACT_POOL, best_plan
from learner.packing.large import good_plan
from learner.packing.length import check_lengths, segments_of


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
