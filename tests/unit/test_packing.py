"""Which segments share a forward (PACK-01 to PACK-03, PACK-05, DDP-02)."""

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from binpacking.to_constant_volume import to_constant_volume
from hypothesis import given
from hypothesis import strategies as st

from learner.config import load_config
from learner.rollout.distribution import PARTS, cut
from learner.stages.packing import StepPacker, forwards_due, plan_packs, select_segments
from learner.training.input_checks import check_step_budget
from learner.types import Place
from shared_contracts.errors import ContractError
from tests.unit.refusals import refused
from tests.unit.small_run import WARMUP, ConfigOf

CAPACITY = 20

# Many of the same length, and many that fill a pack alone or in halves.
LENGTHS = st.one_of(st.integers(1, CAPACITY), st.sampled_from([4, 5, 10, CAPACITY]))
POOLS = st.lists(LENGTHS, min_size=1, max_size=20)


def badness(packs: list[list[int]], capacity: int, min_fill: float) -> tuple[int, int, float]:
    """Number of packs, of underfilled packs, minus the smallest fill; packs hold lengths."""
    fills = [sum(pack) / capacity for pack in packs]
    return len(packs), sum(fill < min_fill for fill in fills), -min(fills)


def subset_totals(lengths: Sequence[int]) -> set[int]:
    totals = {0}
    for length in lengths:
        totals |= {total + length for total in totals}
    return totals


# ---- one pack out of a buffer --------------------------------------------------------


@pytest.mark.req("PACK-02", "ARCH-02")
@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ([], []),
        ([20, 1, 2], [0]),
        ([3, 20], [0]),
        ([5, 4, 6], [0, 1, 2]),
        # First come fills 8 + 7 = 15, the other bin is full.
        ([8, 7, 12], [0, 2]),
        # 8 + 12 twice over: the smaller indices.
        ([8, 12, 12], [0, 1]),
        # 8 + 12 beats 8 + 6 + 6: fewer segments.
        ([8, 6, 6, 12], [0, 3]),
        # First come goes on after the 12, which does not fit: 9 + 5 + 6.
        ([9, 5, 12, 6], [0, 1, 3]),
    ],
)
def test_the_oldest_goes_with_what_fills_it_best(lengths: list[int], chosen: list[int]) -> None:
    assert select_segments(lengths, 20) == chosen


def first_come_total(lengths: Sequence[int]) -> int:
    """FIFO-greedy; segments after one that does not fit have a chance."""
    total = 0
    for length in lengths:
        total += length if total + length <= CAPACITY else 0
    return total


@pytest.mark.req("PACK-02", "RES-28")
@pytest.mark.scenario(
    "Deterministic selection",
    "Shared packing helper yields deterministic selection",
    "Multiple short segments pack efficiently under the same cap",
)
@given(POOLS)
def test_a_selection_is_the_oldest_with_others_at_least_as_full_as_fifo(lengths: list[int]) -> None:
    """No older segment of the same length is passed over."""
    chosen = select_segments(lengths, CAPACITY)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert chosen == select_segments(tuple(lengths), CAPACITY)
    total = sum(lengths[i] for i in chosen)
    fullest = max(t for t in subset_totals(lengths[1:]) if t + lengths[0] <= CAPACITY) + lengths[0]
    assert first_come_total(lengths) <= total <= fullest <= CAPACITY
    for length in set(lengths):
        of_length = [i for i, other in enumerate(lengths) if other == length]
        taken = [i for i in chosen if lengths[i] == length]
        assert taken == of_length[: len(taken)]


@pytest.mark.req("PACK-02")
@pytest.mark.scenario("Missing binpacking dependency fails fast")
def test_without_the_binpacking_module_a_run_that_packs_fails_at_its_start(
    monkeypatch: pytest.MonkeyPatch, config_of: ConfigOf
) -> None:
    config = config_of(training={"packing": True})
    check_step_budget(config, 100, 1)
    monkeypatch.setitem(sys.modules, "binpacking", None)
    found, do = "the module 'binpacking' is not installed", "or set training.packing: false"
    with refused("training.packing", found, f"Install it (pip install binpacking) {do}"):
        select_segments([1, 2], 20)
    with pytest.raises(ContractError, match="binpacking"):
        check_step_budget(config, 100, 1)


# ---- a whole pool --------------------------------------------------------------------

MIN_FILLS = st.sampled_from([0.0, 0.5, 0.7, 0.9, 1.0])


@pytest.mark.req("PACK-03", "ARCH-02")
@pytest.mark.parametrize(
    ("lengths", "min_fill", "totals"),
    [
        ([], 0.5, []),
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


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        room = [pack for pack in packs if sum(pack) + length <= capacity]
        if room:
            room[0].append(length)
        else:
            packs.append([length])
    return packs


@pytest.mark.req("PACK-03")
@given(
    st.sampled_from([CAPACITY, 12_000]).flatmap(
        lambda capacity: st.tuples(
            st.lists(
                st.one_of(
                    st.integers(1, capacity),
                    st.integers(1, capacity // 4),
                    st.sampled_from([capacity // 5, capacity // 2, capacity]),
                ),
                min_size=1,
                max_size=40,
            ),
            st.just(capacity),
        )
    ),
    MIN_FILLS,
)
def test_a_plan_holds_every_segment_once_and_is_no_worse_than_either_baseline(
    pool: tuple[list[int], int], min_fill: float
) -> None:
    lengths, capacity = pool
    packs = plan_packs(lengths, capacity, min_fill)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    found = [[lengths[i] for i in pack] for pack in packs]
    assert all(0 < sum(pack) <= capacity for pack in found)
    assert packs == plan_packs(tuple(lengths), capacity, min_fill)
    peer: Any = to_constant_volume(list(lengths), capacity)
    for baseline in (first_fit_decreasing(lengths, capacity), peer):
        assert badness(found, capacity, min_fill) <= badness(baseline, capacity, min_fill)


@pytest.mark.req("PACK-03", "RES-28")
def test_plans_of_steps_have_at_most_one_pack_more_than_their_tokens_need_in_1_of_20() -> None:
    chance = random.Random(0)
    more = 0
    for _ in range(100):
        drawn = [round(chance.lognormvariate(math.log(1_500), 0.6)) for _ in range(32)]
        lengths = [min(max(1, length), 12_000) for length in drawn]
        over = len(plan_packs(lengths, 12_000, 0.6)) - -(-sum(lengths) // 12_000)
        assert over <= 1
        more += over
    assert more <= 5


# ---- the packs of one step -----------------------------------------------------------


@dataclass(frozen=True)
class Item:
    sample_id: str
    length: int

    def __len__(self) -> int:
        return self.length


def items(*lengths: int) -> list[Item]:
    return [Item(f"train.jsonl:{line}", length) for line, length in enumerate(lengths, start=1)]


def lengths_of(packs: list[list[Item]]) -> list[list[int]]:
    return [[len(item) for item in pack] for pack in packs]


def step(
    *, capacity: int = CAPACITY, min_fill: float = 0.5, packing: bool = True
) -> StepPacker[Item, list[Item]]:
    given = {"packing": packing, "packing_min_fill_ratio": min_fill}
    training = load_config(WARMUP).training.model_copy(update=given)
    return StepPacker[Item, list[Item]](training, capacity, list)


@pytest.mark.req("PACK-01", "PACK-02", "ARCH-02")
@pytest.mark.scenario("Carry buffer preserves segments without splitting")
def test_a_pack_is_made_as_soon_as_its_tokens_have_come_and_the_rest_waits() -> None:
    packing = step()
    assert packing.chunk(items(8, 11), last=False) == []
    assert lengths_of(packing.chunk(items(1), last=False)) == [[8, 11, 1]]
    assert lengths_of(packing.chunk(items(8, 7, 12), last=False)) == [[8, 12]]
    assert packing.chunk(items(20), last=False) == [], "one like the 7 may still fit beside it"
    assert lengths_of(packing.chunk(items(13), last=False)) == [[7, 13], [20]]
    assert packing.chunk([], last=True) == []
    assert lengths_of(step().chunk(items(16, 2, 8), last=False)) == [[16, 2]], "almost full"


@pytest.mark.req("ASYNC-01")
def test_no_pack_mixes_two_versions() -> None:
    packing = step()
    assert packing.chunk(items(3), last=False, version=1) == []
    assert lengths_of(packing.chunk(items(4), last=True, version=2)) == [[3], [4]]


@pytest.mark.req("PACK-01")
@pytest.mark.scenario("Oversized segment fails fast")
@pytest.mark.parametrize("last", [False, True])
def test_a_segment_that_no_pack_holds_is_named_with_the_ways_out(last: bool) -> None:
    found = "sample train.jsonl:2 takes 21 tokens and a pack holds 20"
    do = "lower rollout_matching.max_new_tokens, or set training.packing: false"
    with refused("global_max_length", found, f"Raise global_max_length, {do}"):
        step().chunk(items(20, 21), last=last)
    with pytest.raises(ContractError, match="index 1 of the buffer"):
        select_segments([5, 21], 20)
    with pytest.raises(ContractError, match="index 1 of the pool"):
        plan_packs([5, 21], 20, 0.5)


@pytest.mark.parametrize("last", [False, True])
def test_without_packing_each_segment_is_a_pack_of_its_own_however_long(last: bool) -> None:
    packing = step(packing=False)
    coming = items(3, 10 * CAPACITY, 4)
    assert packing.chunk(coming, last=last) == [[item] for item in coming]
    assert packing.chunk([], last=True) == []


@pytest.mark.req("STEP-03")
@pytest.mark.parametrize(("median", "sigma"), [(0.125, 0.6), (0.4, 0.4), (0.5, 0.3), (0.6, 0.1)])
def test_parts_of_a_step_have_few_more_packs_than_the_whole(median: float, sigma: float) -> None:
    """The forwards of half of the packs or more do not wait for the last part."""
    draws, capacity, packs, early = random.Random(0), 12_000, dict.fromkeys((1, PARTS), 0), 0
    for _ in range(60):
        lengths = [draws.lognormvariate(math.log(median * capacity), sigma) for _ in range(32)]
        coming = items(*(min(capacity, int(length)) for length in lengths))
        for parts in packs:
            packer = step(capacity=capacity)
            for chunk in cut(32, 32 // parts):
                last = chunk.stop == 32
                made = len(packer.chunk(coming[chunk.start : chunk.stop], last=last))
                packs[parts] += made
                early += 0 if last else made
    assert packs[PARTS] <= (1.07 if median == 0.5 else 1.05) * packs[1]
    assert early >= packs[PARTS] / 2


@pytest.mark.req("PACK-01", "PACK-03", "PACK-05", "MET-03")
@given(
    st.lists(st.lists(LENGTHS, max_size=4), max_size=3),
    st.lists(LENGTHS, max_size=4),
    st.booleans(),
)
def test_every_segment_of_a_step_is_in_one_pack_at_the_place_that_is_logged(
    chunks: list[list[int]], last: list[int], packing: bool
) -> None:
    packer = step(packing=packing)
    coming = items(*[length for chunk in [*chunks, last] for length in chunk])
    expected: dict[Item, Place] = {}
    packs = arrived = 0
    for number, chunk in enumerate([*chunks, last]):
        arrived, began = arrived + len(chunk), arrived
        for pack in packer.chunk(coming[began:arrived], last=number == len(chunks)):
            assert 0 < sum(map(len, pack)) <= CAPACITY
            for position, item in enumerate(pack):
                assert item not in expected
                expected[item] = Place(len(item), packs, position, arrived)
            packs += 1
    assert packer.places == [expected[item] for item in coming]
    total = sum(map(len, coming))
    fill = total / (packs * CAPACITY) if packs else 0.0
    assert packer.payload().metrics() == {
        "packing/post_rollout_fill": fill,
        "packing/post_rollout_segments": arrived,
        "packing/post_rollout_packs": packs,
        "packing/post_rollout_selected_total_len": total,
    }


@pytest.mark.req("DDP-02")
@pytest.mark.parametrize(
    ("ready", "over", "unsynced", "due"),
    [
        ([3, 1], [False, False], False, 1),
        ([3, 2], [False, True], True, 2),
        ([3, 0], [True, False], True, 0),
        ([3, 0], [True, True], True, 3),
        ([0, 0], [True, True], True, 1),
        ([0, 0], [True, True], False, 0),
    ],
)
def test_ranks_run_what_all_have_and_at_the_end_what_one_has_or_what_synchronizes(
    ready: list[int], over: list[bool], unsynced: bool, due: int
) -> None:
    assert forwards_due(ready, over, unsynced=unsynced) == due
