"""The pool of a step, divided into packs (PACK-03)."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.stages.packing.plan import (
    EXACT_POOL,
    best_plan,
    fewest_packs,
    good_plan,
    plan_packs,
    subset_of_total,
)
from tests.unit.pools import (
    CAPACITY,
    LENGTHS,
    badness,
    fewest_possible,
    first_fit_decreasing,
    lengths_in,
    partitions,
    subset_totals,
)

MIN_FILLS = st.sampled_from([0.0, 0.5, 0.7, 0.9, 1.0])


def large_pools(capacity: int) -> st.SearchStrategy[list[int]]:
    """Pools beyond the exact search: any lengths, few different ones, mostly short or long."""
    lengths = st.sampled_from(
        [
            st.integers(1, capacity),
            st.sampled_from([capacity // 5, capacity // 4, capacity // 2, capacity]),
            st.integers(1, capacity // 4),
            st.integers(capacity // 4, 3 * capacity // 4),
        ]
    )
    return lengths.flatmap(lambda some: st.lists(some, min_size=EXACT_POOL + 1, max_size=60))


LARGE_POOLS = st.sampled_from([CAPACITY, 12_000, 1_000_000]).flatmap(
    lambda capacity: st.tuples(large_pools(capacity), st.just(capacity))
)


# ---- plans ---------------------------------------------------------------------------


@pytest.mark.req("PACK-03", "ARCH-02")
@pytest.mark.parametrize(
    ("lengths", "min_fill", "totals"),
    [
        ([], 0.5, []),
        ([20, 20], 0.5, [20, 20]),
        ([5, 5, 5, 5], 0.5, [20]),
        # 8 + 7 + 5 and 6 + 5 + 5 + 4.
        ([8, 7, 6, 5, 5, 5, 4], 0.5, [20, 20]),
        # Two packs either way: 12 and 16 rather than 20 and 8.
        ([12, 8, 8], 0.5, [12, 16]),
        # One underfilled pack of 14 rather than two of 17 ...
        ([10, 10, 7, 7], 0.9, [14, 20]),
        # ... unless 17 is enough.
        ([10, 10, 7, 7], 0.8, [17, 17]),
        # A pack of 11 is filled to 0.55, though 0.55 * 20 is more than 11 in floating point.
        ([10, 10, 1, 1], 0.55, [11, 11]),
    ],
)
def test_plans_by_hand(lengths: list[int], min_fill: float, totals: list[int]) -> None:
    packs = plan_packs(lengths, 20, min_fill)
    assert sorted(sum(lengths[i] for i in pack) for pack in packs) == totals
    assert packs == sorted(sorted(pack) for pack in packs)


@pytest.mark.req("PACK-03")
@given(st.lists(LENGTHS, min_size=1, max_size=7), MIN_FILLS)
def test_no_division_of_a_small_pool_is_better(lengths: list[int], min_fill: float) -> None:
    best = min(
        badness(packs, CAPACITY, min_fill)
        for packs in partitions(lengths)
        if all(sum(pack) <= CAPACITY for pack in packs)
    )
    packs = lengths_in(plan_packs(lengths, CAPACITY, min_fill), lengths)
    assert badness(packs, CAPACITY, min_fill) == best


@pytest.mark.req("PACK-03")
@given(st.lists(st.integers(1, 12), min_size=8, max_size=EXACT_POOL), MIN_FILLS)
def test_up_to_twelve_segments_no_plan_has_fewer_packs_or_fills_them_better(
    lengths: list[int], min_fill: float
) -> None:
    packs = lengths_in(plan_packs(lengths, CAPACITY, min_fill), lengths)
    rival = good_plan(lengths, CAPACITY, math.ceil(min_fill * CAPACITY))
    assert badness(packs, CAPACITY, min_fill) <= badness(rival, CAPACITY, min_fill)
    at_least = -(-sum(lengths) // CAPACITY)
    assert len(packs) == at_least or len(packs) == fewest_possible(lengths, CAPACITY)


@pytest.mark.req("PACK-03")
@given(LARGE_POOLS, MIN_FILLS)
def test_a_plan_holds_every_segment_once_and_is_no_worse_than_first_fit_decreasing(
    pool: tuple[list[int], int], min_fill: float
) -> None:
    lengths, capacity = pool
    packs = plan_packs(lengths, capacity, min_fill)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < sum(pack) <= capacity for pack in lengths_in(packs, lengths))
    assert len(packs) <= first_fit_decreasing(lengths, capacity)
    assert packs == plan_packs(tuple(lengths), capacity, min_fill)


@pytest.mark.req("PACK-03")
@given(st.lists(LENGTHS, max_size=40), st.randoms(use_true_random=False))
def test_the_order_of_a_pool_does_not_matter_to_its_packs(
    lengths: list[int], chance: random.Random
) -> None:
    shuffled = chance.sample(lengths, len(lengths))
    plans = [lengths_in(plan_packs(pool, CAPACITY, 0.7), pool) for pool in (lengths, shuffled)]
    if len(lengths) > EXACT_POOL:
        packs, others = (sorted(sorted(pack) for pack in plan) for plan in plans)
        assert packs == others
    elif lengths:
        assert len({badness(plan, CAPACITY, 0.7) for plan in plans}) == 1


@pytest.mark.req("PACK-03")
def test_lognormal_pools_need_as_many_packs_as_their_tokens() -> None:
    chance = random.Random(0)
    fewest = 0
    for _ in range(100):
        drawn = [round(chance.lognormvariate(math.log(1_500), 0.6)) for _ in range(256)]
        lengths = [min(max(1, length), 12_000) for length in drawn]
        packs = lengths_in(plan_packs(lengths, 12_000, 0.6), lengths)
        fewest += len(packs) == -(-sum(lengths) // 12_000)
        assert min(map(sum, packs)) >= 0.99 * sum(lengths) / len(packs), "packs are even"
    assert fewest >= 95


@pytest.mark.req("PACK-03")
def test_where_three_share_a_pack_nearly_all_plans_are_as_few_as_the_lower_bound() -> None:
    chance = random.Random(0)
    fewest = 0
    for _ in range(50):
        lengths = [round(chance.gauss(4_000, 800)) for _ in range(32)]
        fewest += len(plan_packs(lengths, 12_000, 0.6)) == fewest_packs(lengths, 12_000)
    assert fewest >= 45


@pytest.mark.req("PACK-03")
def test_a_large_pool_fills_its_packs_evenly_where_that_leaves_none_underfilled() -> None:
    lengths = [10] * 10 + [4] * 6
    assert first_fit_decreasing(lengths, 20) == 7
    packs = plan_packs(lengths, 20, 0.7)
    assert badness(lengths_in(packs, lengths), 20, 0.7)[:2] == (7, 0)


@pytest.mark.req("PACK-03")
def test_a_large_pool_that_cannot_fill_its_packs_leaves_few_underfilled() -> None:
    lengths = [11] * 13 + [3] * 6
    packs = lengths_in(plan_packs(lengths, 20, 0.8), lengths)
    assert badness(packs, 20, 0.8)[:2] == (13, 10), "three of 11 + 3 + 3"


@pytest.mark.req("PACK-03")
def test_a_pack_that_is_underfilled_takes_from_one_that_is_not() -> None:
    lengths = [18, 14, 13, 13, 12, 10, 9, 9, 7, 7, 6, 4, 2]
    packs = lengths_in(plan_packs(lengths, 20, 0.7), lengths)
    assert badness(packs, 20, 0.7) == (7, 0, -0.8)


@pytest.mark.req("PACK-03")
def test_a_capacity_too_large_to_count_in_tokens_changes_no_plan_of_whole_shares() -> None:
    lengths = [18, 14, 13, 13, 12, 10, 9, 9, 7, 7, 6, 4, 2]
    # 20 shares of a pack each.
    many = [length * 10**7 for length in lengths]
    packs = lengths_in(plan_packs(many, 20 * 10**7, 0.7), many)
    assert badness(packs, 20 * 10**7, 0.7) == (7, 0, -0.8)


@pytest.mark.req("PACK-03")
def test_what_plans_large_pools_plans_small_ones_nearly_as_well_as_can_be() -> None:
    chance = random.Random(0)
    as_even = 0
    for _ in range(200):
        lengths = [chance.randint(1, 14) for _ in range(chance.randint(6, EXACT_POOL))]
        good, best = (
            badness(plan(lengths, CAPACITY, 14), CAPACITY, 0.7) for plan in (good_plan, best_plan)
        )
        assert good[:2] == best[:2], "as few packs, and as few underfilled"
        as_even += good == best
    assert as_even >= 195


@pytest.mark.req("PACK-03")
def test_a_large_pool_on_which_best_fit_takes_a_pack_more_than_first_fit() -> None:
    percent = [20, 65, 72, 5, 39, 67, 21, 23, 12, 21, 21, 17, 47, 10, 50, 43, 76, 39, 45, 5, 14, 76]
    assert len(plan_packs(percent, 100, 0.7)) == 8


@pytest.mark.req("PACK-03")
def test_many_raw_rollouts_share_few_packs() -> None:
    lengths = [300 + 13 * i for i in range(32)]
    packs = plan_packs(lengths, 12_000, 0.7)
    assert len(packs) == -(-sum(lengths) // 12_000)


@pytest.mark.req("PACK-03")
@pytest.mark.parametrize(
    ("shortest", "longest", "capacity", "min_fill"),
    [
        (39_321, 78_643, 131_072, 0.9),
        (300_000, 600_000, 1_000_000, 0.9),
        (30_000, 70_000, 131_072, 1.0),
        (3_000_000, 6_000_000, 10_000_000, 0.9),
    ],
)
def test_the_work_for_a_large_pool_is_bounded_at_any_capacity(
    shortest: int, longest: int, capacity: int, min_fill: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = 0

    def counted(lengths: Sequence[int], at_least: int, at_most: int) -> list[int]:
        nonlocal work
        work += len(lengths) * at_most
        assert work <= 4 << 31, "a few searches, each of less than 2**31 bit operations"
        return subset_of_total(lengths, at_least, at_most)

    monkeypatch.setattr("learner.stages.packing.plan.subset_of_total", counted)
    chance = random.Random(0)
    lengths = [chance.randint(shortest, longest) for _ in range(500)]
    packs = plan_packs(lengths, capacity, min_fill)
    assert work > 0
    assert sorted(i for pack in packs for i in pack) == list(range(500))
    totals = [sum(pack) for pack in lengths_in(packs, lengths)]
    assert max(totals) <= capacity
    assert len(packs) <= first_fit_decreasing(lengths, capacity)
    assert min_fill == 1 or min(totals) >= min_fill * capacity


@pytest.mark.req("PACK-03")
def test_lengths_rounded_to_units_of_a_pack_do_not_make_a_pack_too_long() -> None:
    # Beside the first the others share a pack, by a token; their units are too many for one.
    # 333_340 + 333_341 are fewer tokens than the first and more units: then 1_000_018 remain.
    lengths = [666_700, 333_341, 333_340, 333_318]
    packs = good_plan(lengths, 1_000_000, 1_000_000)
    assert sorted(map(sum, packs)) == [666_700, 999_999]


# ---- what plans are made of ----------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "packs"),
    [
        ([], 0),
        ([20], 1),
        ([10, 10, 10], 2),
        # By their tokens two; but no two of them share a pack.
        ([11, 11, 11], 3),
        # No 8 fits beside a 13: two of them need a third pack.
        ([13, 13, 8, 8], 3),
        # The 10 fits beside no 11, however much room the 1 leaves there.
        ([11, 11, 11, 10, 1], 4),
    ],
)
def test_a_lower_bound_by_hand(lengths: list[int], packs: int) -> None:
    assert fewest_packs(lengths, 20) == packs


@given(st.lists(LENGTHS, max_size=9))
def test_the_lower_bound_is_one_and_no_less_than_the_tokens_need(lengths: list[int]) -> None:
    bound = fewest_packs(lengths, CAPACITY)
    assert -(-sum(lengths) // CAPACITY) <= bound <= len(plan_packs(lengths, CAPACITY, 0.5))


@given(st.lists(st.integers(1, 30), max_size=10), st.integers(0, 60), st.integers(0, 20))
def test_a_subset_has_the_smallest_total_that_is_enough_or_the_largest_that_is_not(
    lengths: list[int], at_least: int, spare: int
) -> None:
    indices = subset_of_total(lengths, at_least, at_least + spare)
    assert indices == sorted(set(indices))
    reachable = {total for total in subset_totals(lengths) if total <= at_least + spare}
    enough = {total for total in reachable if total >= at_least}
    expected = min(enough) if enough else max(reachable)
    assert sum(lengths[i] for i in indices) == expected


@given(st.lists(st.integers(1, 5_000), max_size=12), st.integers(0, 8_000), st.integers(0, 4_000))
def test_in_a_large_room_the_total_is_off_by_a_two_thousandth_at_most(
    lengths: list[int], at_least: int, spare: int
) -> None:
    at_most = at_least + spare
    total = sum(lengths[i] for i in subset_of_total(lengths, at_least, at_most))
    enough = [t for t in subset_totals(lengths) if at_least <= t <= at_most]
    assert total <= at_most
    if enough:
        assert min(enough) <= total <= max(min(enough), at_least + at_most // 2_048)
