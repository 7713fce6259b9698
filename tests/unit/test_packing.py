"""One pack out of a buffer, and the buffer (PACK-01 and PACK-02)."""

import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from learner.stages.packing import SegmentBuffer
from learner.stages.packing.plan import plan_packs, select_segments
from shared_contracts.errors import ContractError
from tests.unit.pools import CAPACITY, LENGTHS, subset_totals


def first_come_total(lengths: Sequence[int], go_on: bool) -> int:
    """FIFO-greedy; go_on: whether segments after one that does not fit have a chance."""
    total = 0
    for length in lengths:
        if total + length <= CAPACITY:
            total += length
        elif not go_on:
            break
    return total


# ---- length --------------------------------------------------------------------------


@pytest.mark.req("PACK-01")
@pytest.mark.scenario("Oversized segment fails fast")
def test_a_segment_longer_than_a_pack_is_refused_with_three_ways_out() -> None:
    buffer: SegmentBuffer[str] = SegmentBuffer(capacity=20, limit=8)
    buffer.add("a", 20, "train.jsonl:6")
    with pytest.raises(ContractError) as error:
        buffer.add("b", 21, "train.jsonl:7")
    assert error.value.where == "global_max_length"
    assert error.value.found == "sample train.jsonl:7 takes 21 tokens and a pack holds 20"
    assert error.value.do == (
        "Raise global_max_length, lower rollout_matching.max_new_tokens, "
        "or set training.packing: false"
    )


@pytest.mark.req("PACK-01")
def test_selecting_and_planning_refuse_such_a_segment_too() -> None:
    with pytest.raises(ContractError, match="index 1 of the buffer"):
        select_segments([5, 21], 20)
    with pytest.raises(ContractError, match="index 1 of the pool"):
        plan_packs([5, 21], 20, 0.5)


@pytest.mark.req("PACK-01")
@pytest.mark.parametrize("capacity", [0, -1])
def test_a_pack_that_holds_nothing_refuses_every_segment(capacity: int) -> None:
    assert select_segments([], capacity) == []
    assert plan_packs([], capacity, 0.5) == []
    for pack in (lambda: select_segments([1], capacity), lambda: plan_packs([1], capacity, 0.5)):
        with pytest.raises(ContractError, match="global_max_length"):
            pack()


@pytest.mark.parametrize("length", [0, -3])
def test_a_segment_without_tokens_is_a_mistake_of_the_program(length: int) -> None:
    buffer: SegmentBuffer[str] = SegmentBuffer(20, limit=8)
    for pack in (
        lambda: select_segments([5, length], 20),
        lambda: plan_packs([5, length], 20, 0.5),
        lambda: buffer.add("a", length, "a"),
    ):
        with pytest.raises(AssertionError, match=f"has {length} tokens"):
            pack()


# ---- select_segments -----------------------------------------------------------------


@pytest.mark.req("PACK-02", "ARCH-02")
@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ([], []),
        ([20], [0]),
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
def test_the_oldest_goes_with_what_fills_the_pack_best(
    lengths: list[int], chosen: list[int]
) -> None:
    assert select_segments(lengths, 20) == chosen


@pytest.mark.req("PACK-02")
@pytest.mark.scenario(
    "Deterministic selection", "Shared packing helper yields deterministic selection"
)
@given(st.lists(LENGTHS, min_size=1, max_size=20))
def test_a_selection_holds_the_oldest_once_each_in_insertion_order(lengths: list[int]) -> None:
    chosen = select_segments(lengths, CAPACITY)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert chosen == select_segments(tuple(lengths), CAPACITY)


@pytest.mark.req("PACK-02")
@pytest.mark.scenario("Multiple short segments pack efficiently under the same cap")
@given(st.lists(LENGTHS, min_size=1, max_size=20))
def test_a_selection_fits_and_is_as_full_as_first_come_at_least(lengths: list[int]) -> None:
    total = sum(lengths[i] for i in select_segments(lengths, CAPACITY))
    fullest = max(t for t in subset_totals(lengths[1:]) if t + lengths[0] <= CAPACITY) + lengths[0]
    first_come = first_come_total(lengths, go_on=True)
    assert first_come_total(lengths, go_on=False) <= first_come <= total <= fullest <= CAPACITY


@pytest.mark.req("PACK-02")
@given(st.lists(LENGTHS, min_size=1, max_size=20))
def test_no_older_segment_of_the_same_length_is_passed_over(lengths: list[int]) -> None:
    chosen = select_segments(lengths, CAPACITY)
    for length in set(lengths):
        of_length = [i for i, other in enumerate(lengths) if other == length]
        taken = [i for i in chosen if lengths[i] == length]
        assert taken == of_length[: len(taken)]


@pytest.mark.req("PACK-02")
@pytest.mark.scenario("Missing binpacking dependency fails fast")
def test_without_the_binpacking_module_selecting_fails_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "binpacking", None)
    with pytest.raises(ContractError) as error:
        select_segments([1, 2], 20)
    assert error.value.where == "training.packing"
    assert error.value.found == "the module 'binpacking' is not installed"
    assert error.value.do == "Install it (pip install binpacking) or set training.packing: false"


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
@pytest.mark.scenario("Carry buffer overflow fails fast with actionable guidance")
def test_a_full_buffer_names_the_sample_and_the_ways_out() -> None:
    buffer: SegmentBuffer[str] = SegmentBuffer(capacity=20, limit=2)
    buffer.add("a", 1, "x:2")
    buffer.add("b", 1, "x:3")
    with pytest.raises(ContractError) as error:
        buffer.add("c", 1, "x:4")
    assert error.value.where == "training.packing_buffer"
    assert error.value.found == "sample x:4 comes when 2 segments already wait"
    assert error.value.do == (
        "Raise training.packing_buffer or lower training.effective_batch_size"
    )


class BufferAndList(RuleBasedStateMachine):
    """A buffer beside a plain list of (name, length) in order of insertion."""

    LIMIT = 6

    def __init__(self) -> None:
        super().__init__()
        self.buffer: SegmentBuffer[tuple[int, int]] = SegmentBuffer(CAPACITY, self.LIMIT)
        self.waiting: list[tuple[int, int]] = []
        self.added = 0

    @rule(length=LENGTHS)
    def add(self, length: int) -> None:
        self.added += 1
        segment = (self.added, length)
        if len(self.waiting) == self.LIMIT:
            with pytest.raises(ContractError, match="packing_buffer"):
                self.buffer.add(segment, length, "a.jsonl:1")
        else:
            self.buffer.add(segment, length, "a.jsonl:1")
            self.waiting.append(segment)

    @rule(excess=st.integers(1, 3))
    def add_too_long(self, excess: int) -> None:
        with pytest.raises(ContractError, match="global_max_length"):
            self.buffer.add((0, 0), CAPACITY + excess, "a.jsonl:1")

    @rule()
    def take_pack(self) -> None:
        pack = self.buffer.take_pack()
        assert pack[:1] == self.waiting[:1], "the oldest goes first"
        assert pack == [segment for segment in self.waiting if segment in pack], "in order"
        assert sum(length for _, length in pack) <= CAPACITY
        self.waiting = [segment for segment in self.waiting if segment not in pack]

    @rule(min_fill=st.sampled_from([0.0, 0.7]))
    def take_pool(self, min_fill: float) -> None:
        packs = self.buffer.take_pool(min_fill)
        assert all(0 < sum(length for _, length in pack) <= CAPACITY for pack in packs)
        assert sorted(segment for pack in packs for segment in pack) == self.waiting
        self.waiting = []

    @invariant()
    def as_many_wait(self) -> None:
        assert len(self.buffer) == len(self.waiting)


@pytest.mark.req("PACK-01", "PACK-02")
@pytest.mark.scenario("Carry buffer preserves segments without splitting")
def test_a_buffer_loses_doubles_and_reorders_nothing() -> None:
    run_state_machine_as_test(BufferAndList, settings=settings(stateful_step_count=20))
