"""The packs of one step, while its segments are still coming (PACK-01, PACK-03, DDP-02)."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.packing import StepPacking, forwards_due
from shared_contracts.errors import ContractError
from tests.unit.pools import CAPACITY, LENGTHS


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


def step(*, limit: int = 8, min_fill: float = 0.5, packing: bool = True) -> StepPacking[Item]:
    return StepPacking[Item](CAPACITY, limit, min_fill, packing=packing)


@pytest.mark.req("PACK-01", "ARCH-02")
def test_a_pack_is_made_as_soon_as_its_tokens_have_come_and_the_rest_waits() -> None:
    packing = step()
    assert packing.add(items(8, 11)) == []
    assert lengths_of(packing.add(items(1))) == [[8, 11, 1]]
    assert lengths_of(packing.add(items(8, 7, 12))) == [[8, 12]]
    assert lengths_of(packing.add(items(20))) == [[7], [20]], "the oldest goes first"
    assert packing.rest([]) == []


@pytest.mark.req("PACK-03")
def test_the_last_segments_share_the_fewest_packs_with_all_that_waits() -> None:
    packing = step(min_fill=0.9)
    assert packing.add(items(10)) == []
    # One underfilled pack of 14 rather than two of 17.
    assert sorted(lengths_of(packing.rest(items(10, 7, 7)))) == [[7, 7], [10, 10]]
    assert packing.rest([]) == []


@pytest.mark.req("PACK-01")
@pytest.mark.parametrize("last", [False, True])
def test_a_segment_that_no_pack_holds_is_named_by_its_sample(last: bool) -> None:
    packing = step()
    with pytest.raises(ContractError, match=r"sample train\.jsonl:2 takes 21 tokens"):
        (packing.rest if last else packing.add)(items(1, 21))


@pytest.mark.req("PACK-01")
@pytest.mark.parametrize("last", [False, True])
def test_no_more_segments_wait_than_the_limit(last: bool) -> None:
    packing = step(limit=2)
    with pytest.raises(ContractError, match=r"sample train\.jsonl:3 comes when 2 segments"):
        (packing.rest if last else packing.add)(items(1, 1, 1))


@pytest.mark.parametrize("last", [False, True])
def test_without_packing_each_segment_is_a_pack_of_its_own_however_long(last: bool) -> None:
    packing = step(limit=1, packing=False)
    coming = items(3, 10 * CAPACITY, 4)
    assert (packing.rest if last else packing.add)(coming) == [[item] for item in coming]
    assert packing.rest([]) == []


@pytest.mark.req("PACK-01", "PACK-03")
@given(
    st.lists(st.lists(LENGTHS, max_size=4), min_size=1, max_size=3),
    st.lists(LENGTHS, max_size=4),
    st.booleans(),
)
def test_every_segment_of_a_step_is_in_one_pack(
    chunks: list[list[int]], last: list[int], packing: bool
) -> None:
    dividing = step(limit=16, packing=packing)
    coming = items(*[length for chunk in [*chunks, last] for length in chunk])
    left = iter(coming)
    packs = [pack for chunk in chunks for pack in dividing.add([next(left) for _ in chunk])]
    packs += dividing.rest(list(left))
    assert sorted((item for pack in packs for item in pack), key=coming.index) == coming
    assert all(0 < sum(map(len, pack)) <= CAPACITY for pack in packs)


@pytest.mark.req("DDP-02")
def test_ranks_run_what_all_have_and_at_the_end_what_one_has_or_what_synchronizes() -> None:
    assert forwards_due([3, 1], [False, False], unsynced=False) == 1
    assert forwards_due([3, 2], [False, True], unsynced=True) == 2
    assert forwards_due([3, 0], [True, False], unsynced=True) == 0
    assert forwards_due([3, 0], [True, True], unsynced=True) == 3
    assert forwards_due([0, 0], [True, True], unsynced=True) == 1
    assert forwards_due([0, 0], [True, True], unsynced=False) == 0
