"""Scenarios of post-rollout packing (seed 000), each under its own name."""

import sys
from collections.abc import Sequence

import pytest

from learner.packing import SegmentBuffer, select_segments
from shared_contracts.errors import ContractError

PACKING_LENGTH = 100


def fifo_total(lengths: Sequence[int]) -> int:
    total = 0
    for length in lengths:
        if total + length <= PACKING_LENGTH:
            total += length
    return total


@pytest.mark.req("PACK-02")
def test_multiple_short_segments_pack_efficiently_under_the_same_cap() -> None:
    lengths = [40, 35, 50, 20, 10]
    chosen = select_segments(lengths, PACKING_LENGTH)
    total = sum(lengths[i] for i in chosen)
    assert 0 in chosen
    assert fifo_total(lengths) < total <= PACKING_LENGTH


@pytest.mark.req("PACK-02")
def test_deterministic_selection() -> None:
    lengths = [30, 20, 50, 30, 20, 50, 10]
    first, second = (select_segments(list(lengths), PACKING_LENGTH) for _ in range(2))
    assert first == second == sorted(first)


@pytest.mark.req("PACK-01")
def test_oversized_segment_fails_fast() -> None:
    buffer: SegmentBuffer[str] = SegmentBuffer(PACKING_LENGTH, limit=8)
    with pytest.raises(ContractError) as error:
        buffer.add("long", PACKING_LENGTH + 1, "train.jsonl:3")
    for way_out in ("global_max_length", "max_new_tokens", "training.packing"):
        assert way_out in error.value.do
    assert "train.jsonl:3" in error.value.found
    assert len(buffer) == 0


@pytest.mark.req("PACK-02")
def test_missing_binpacking_dependency_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "binpacking", None)
    with pytest.raises(ContractError) as error:
        select_segments([10, 20], PACKING_LENGTH)
    assert "binpacking" in error.value.found
    assert "Install" in error.value.do
    assert "training.packing" in error.value.do


@pytest.mark.req("PACK-01", "PACK-02")
def test_carry_buffer_preserves_segments_without_splitting() -> None:
    lengths = {"a": 60, "b": 50, "c": 30, "d": 70, "e": 10}
    buffer: SegmentBuffer[str] = SegmentBuffer(PACKING_LENGTH, limit=8)
    for name, length in lengths.items():
        buffer.add(name, length, name)
    packs = []
    while len(buffer):
        waiting = len(buffer)
        pack = buffer.take_pack()
        assert sum(lengths[name] for name in pack) <= PACKING_LENGTH
        assert len(buffer) == waiting - len(pack), "what a pack leaves over goes on waiting"
        packs.append(pack)
    assert len(packs) > 1
    assert sorted(name for pack in packs for name in pack) == sorted(lengths)


@pytest.mark.req("PACK-01")
def test_carry_buffer_overflow_fails_fast_with_actionable_guidance() -> None:
    buffer: SegmentBuffer[str] = SegmentBuffer(PACKING_LENGTH, limit=2)
    buffer.add("a", 60, "a")
    buffer.add("b", 60, "b")
    with pytest.raises(ContractError) as error:
        buffer.add("c", 60, "c")
    assert error.value.where == "training.packing_buffer"
    assert "effective_batch_size" in error.value.do
    assert len(buffer) == 2, "what waits already is not lost"


@pytest.mark.req("PACK-02")
def test_shared_packing_helper_yields_deterministic_selection() -> None:
    lengths = [12, 7, 33, 21, 8, 40, 40, 5, 9, 61]

    def all_packs() -> list[list[int]]:
        buffer: SegmentBuffer[int] = SegmentBuffer(PACKING_LENGTH, limit=16)
        for index, length in enumerate(lengths):
            buffer.add(index, length, str(index))
        packs = []
        while len(buffer):
            packs.append(buffer.take_pack())
        return packs

    assert all_packs() == all_packs()
