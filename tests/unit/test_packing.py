"""Packing (section 11 of the contract)."""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.packing import (
    EXACT_POOL,
    SegmentBuffer,
    check_length,
    plan_packs,
    select_segments,
)
from shared_contracts.errors import ContractError

CAPACITY = 20
LENGTHS = st.integers(1, CAPACITY)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to divide items into packs."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for packs in partitions(rest):
        yield [[first], *packs]
        for k in range(len(packs)):
            yield [*packs[:k], [first, *packs[k]], *packs[k + 1 :]]


def badness(lengths: list[int], packs: list[list[int]], min_fill: float) -> tuple[int, int, float]:
    fills = [sum(lengths[i] for i in pack) / CAPACITY for pack in packs]
    return len(packs), sum(fill < min_fill for fill in fills), -min(fills)


def first_fit_decreasing(lengths: list[int]) -> int:
    totals: list[int] = []
    for length in sorted(lengths, reverse=True):
        for k, total in enumerate(totals):
            if total + length <= CAPACITY:
                totals[k] += length
                break
        else:
            totals.append(length)
    return len(totals)


def first_come_total(lengths: list[int]) -> int:
    total = 0
    for length in lengths:
        if total + length <= CAPACITY:
            total += length
    return total


# ---- length --------------------------------------------------------------------------


@pytest.mark.req("PACK-01")
def test_a_segment_longer_than_a_pack_is_refused_with_three_ways_out() -> None:
    check_length(20, 20, "train.jsonl:7")
    with pytest.raises(ContractError) as error:
        check_length(21, 20, "train.jsonl:7")
    assert error.value.where == "global_max_length"
    assert "train.jsonl:7 takes 21 tokens" in error.value.found
    for way_out in ("global_max_length", "max_new_tokens", "training.packing: false"):
        assert way_out in error.value.do


@pytest.mark.req("PACK-01")
def test_selecting_and_planning_refuse_such_a_segment_too() -> None:
    with pytest.raises(ContractError, match="index 1 of the buffer"):
        select_segments([5, 21], 20)
    with pytest.raises(ContractError, match="index 1 of the pool"):
        plan_packs([5, 21], 20, 0.5)


# ---- select_segments -----------------------------------------------------------------


@pytest.mark.req("PACK-02", "ARCH-02")
@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ([], []),
        ([20], [0]),
        ([3, 20], [0]),
        ([5, 4, 6], [0, 1, 2]),
        # First come fills 8 + 7 = 15, the other bin is full.
        ([8, 7, 12], [0, 2]),
        # 8 + 12 twice over: the smaller indices.
        ([8, 12, 12], [0, 1]),
        # 8 + 12 beats 8 + 6 + 6: fewer segments.
        ([8, 6, 6, 12], [0, 3]),
    ],
)
def test_the_oldest_goes_with_what_fills_the_pack_best(
    lengths: list[int], chosen: list[int]
) -> None:
    assert select_segments(lengths, 20) == chosen


@pytest.mark.req("PACK-02")
@given(st.lists(LENGTHS, min_size=1, max_size=20))
def test_a_selection_fits_holds_the_oldest_and_is_no_worse_than_first_come(
    lengths: list[int],
) -> None:
    chosen = select_segments(lengths, CAPACITY)
    total = sum(lengths[i] for i in chosen)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert first_come_total(lengths) <= total <= CAPACITY
    assert chosen == select_segments(list(lengths), CAPACITY)


@pytest.mark.req("PACK-02")
def test_without_the_binpacking_module_selecting_fails_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "binpacking", None)
    with pytest.raises(ContractError) as error:
        select_segments([1, 2], 20)
    assert "pip install binpacking" in error.value.do
    assert "training.packing: false" in error.value.do


# ---- the buffer ----------------------------------------------------------------------


@pytest.mark.req("PACK-01", "PACK-02")
def test_what_a_pack_leaves_over_is_carried_whole_and_in_order() -> None:
    buffer: SegmentBuffer[str] = SegmentBuffer(capacity=20, limit=8)
    for name, length in (("a", 8), ("b", 7), ("c", 12), ("d", 6)):
        buffer.add(name, length, name)
    assert buffer.take_pack() == ["a", "c"]
    assert len(buffer) == 2
    buffer.add("e", 7, "e")
    assert buffer.take_pack() == ["b", "d", "e"]
    assert buffer.take_pack() == []


@pytest.mark.req("PACK-01")
def test_a_full_buffer_and_a_long_segment_are_refused_at_insertion() -> None:
    buffer: SegmentBuffer[str] = SegmentBuffer(capacity=20, limit=2)
    with pytest.raises(ContractError, match="takes 21 tokens"):
        buffer.add("long", 21, "x:1")
    buffer.add("a", 1, "x:2")
    buffer.add("b", 1, "x:3")
    with pytest.raises(ContractError) as error:
        buffer.add("c", 1, "x:4")
    assert error.value.where == "training.packing_buffer"
    assert "x:4" in error.value.found
    assert "Raise training.packing_buffer" in error.value.do
    assert len(buffer) == 2


@pytest.mark.req("PACK-01")
@given(st.lists(LENGTHS, max_size=15))
def test_every_segment_leaves_the_buffer_exactly_once(lengths: list[int]) -> None:
    buffer: SegmentBuffer[int] = SegmentBuffer(CAPACITY, limit=len(lengths))
    for index, length in enumerate(lengths):
        buffer.add(index, length, str(index))
    taken: list[int] = []
    while len(buffer):
        pack = buffer.take_pack()
        assert sum(lengths[i] for i in pack) <= CAPACITY
        taken += pack
    assert sorted(taken) == list(range(len(lengths)))


# ---- plan_packs ----------------------------------------------------------------------


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
    ],
)
def test_plans_by_hand(lengths: list[int], min_fill: float, totals: list[int]) -> None:
    packs = plan_packs(lengths, 20, min_fill)
    assert sorted(sum(lengths[i] for i in pack) for pack in packs) == totals
    assert packs == sorted(sorted(pack) for pack in packs)


@pytest.mark.req("PACK-03")
@given(st.lists(LENGTHS, min_size=1, max_size=7), st.sampled_from([0.0, 0.5, 0.7, 0.9]))
def test_no_division_of_a_small_pool_is_better(lengths: list[int], min_fill: float) -> None:
    best = min(
        badness(lengths, packs, min_fill)
        for packs in partitions(list(range(len(lengths))))
        if all(sum(lengths[i] for i in pack) <= CAPACITY for pack in packs)
    )
    assert badness(lengths, plan_packs(lengths, CAPACITY, min_fill), min_fill) == best


def fewest_packs(lengths: list[int]) -> int:
    """Smallest number of packs, by the best (packs, fill of the last) of every subset."""
    best = [(1, 0)] + [(len(lengths) + 1, 0)] * (2 ** len(lengths) - 1)
    for mask in range(1, len(best)):
        for i, length in enumerate(lengths):
            if mask >> i & 1:
                packs, fill = best[mask ^ (1 << i)]
                grown = (packs, fill + length) if fill + length <= CAPACITY else (packs + 1, length)
                best[mask] = min(best[mask], grown)
    return best[-1][0]


@pytest.mark.req("PACK-03")
@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=8, max_size=EXACT_POOL))
def test_up_to_twelve_segments_no_plan_has_fewer_packs(lengths: list[int]) -> None:
    assert len(plan_packs(lengths, CAPACITY, 0.7)) == fewest_packs(lengths)


@pytest.mark.req("PACK-03")
@given(st.lists(LENGTHS, max_size=60), st.sampled_from([0.0, 0.7]))
def test_a_plan_holds_every_segment_once_and_is_no_worse_than_first_fit_decreasing(
    lengths: list[int], min_fill: float
) -> None:
    packs = plan_packs(lengths, CAPACITY, min_fill)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= CAPACITY for pack in packs)
    assert len(packs) <= first_fit_decreasing(lengths)
    assert packs == plan_packs(list(lengths), CAPACITY, min_fill)


@pytest.mark.req("PACK-03")
def test_a_large_pool_fills_its_packs_evenly_where_that_leaves_none_underfilled() -> None:
    lengths = [10] * 10 + [4] * 6
    assert first_fit_decreasing(lengths) == 7
    packs = plan_packs(lengths, 20, 0.7)
    assert len(packs) == 7
    assert badness(lengths, packs, 0.7)[1] == 0


@pytest.mark.req("PACK-03")
def test_a_large_pool_on_which_best_fit_takes_a_pack_more_than_first_fit() -> None:
    percent = [20, 65, 72, 5, 39, 67, 21, 23, 12, 21, 21, 17, 47, 10, 50, 43, 76, 39, 45, 5, 14, 76]
    assert len(plan_packs(percent, 100, 0.7)) == 8


@pytest.mark.req("PACK-03")
def test_many_raw_rollouts_share_few_packs() -> None:
    lengths = [300 + 13 * i for i in range(32)]
    packs = plan_packs(lengths, 12_000, 0.7)
    assert len(packs) == -(-sum(lengths) // 12_000)
