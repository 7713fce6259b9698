"""The packs of one step, while its segments are still coming (PACK-01, PACK-03, DDP-02)."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config.training import TrainingConfig
from learner.stages.packing import StepPacker, forwards_due
from learner.types import Place
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


def step(
    *, limit: int = 8, min_fill: float = 0.5, packing: bool = True, fills: list[float] | None = None
) -> StepPacker[Item, list[Item]]:
    """fills: takes what the packs are filled to."""
    training = TrainingConfig.model_validate(
        {
            "run_name": "packed",
            "output_dir": "nowhere",
            "learning_rate": 1e-3,
            "effective_batch_size": 4,
            "max_steps": 1,
            "packing": packing,
            "packing_buffer": limit,
            "packing_min_fill_ratio": min_fill,
        }
    )
    check = None if fills is None else fills.append
    return StepPacker[Item, list[Item]](training, CAPACITY, list, check)


@pytest.mark.req("PACK-01", "ARCH-02")
def test_a_pack_is_made_as_soon_as_its_tokens_have_come_and_the_rest_waits() -> None:
    packing = step()
    assert packing.chunk(items(8, 11), last=False) == []
    assert lengths_of(packing.chunk(items(1), last=False)) == [[8, 11, 1]]
    assert lengths_of(packing.chunk(items(8, 7, 12), last=False)) == [[8, 12]]
    assert lengths_of(packing.chunk(items(20), last=False)) == [[7], [20]], "the oldest goes first"
    assert packing.chunk([], last=True) == []


@pytest.mark.req("PACK-03")
def test_the_last_segments_share_the_fewest_packs_with_all_that_waits() -> None:
    packing = step(min_fill=0.9)
    assert packing.chunk(items(10), last=False) == []
    # One underfilled pack of 14 rather than two of 17.
    assert sorted(lengths_of(packing.chunk(items(10, 7, 7), last=True))) == [[7, 7], [10, 10]]
    assert packing.chunk([], last=True) == []


@pytest.mark.req("PACK-01")
@pytest.mark.parametrize("last", [False, True])
def test_a_segment_that_no_pack_holds_is_named_by_its_sample(last: bool) -> None:
    packing = step()
    with pytest.raises(ContractError, match=r"sample train\.jsonl:2 takes 21 tokens"):
        packing.chunk(items(1, 21), last=last)


@pytest.mark.req("PACK-01")
@pytest.mark.parametrize("last", [False, True])
def test_no_more_segments_wait_than_the_limit(last: bool) -> None:
    packing = step(limit=2)
    with pytest.raises(ContractError, match=r"sample train\.jsonl:3 comes when 2 segments"):
        packing.chunk(items(1, 1, 1), last=last)


@pytest.mark.parametrize("last", [False, True])
def test_without_packing_each_segment_is_a_pack_of_its_own_however_long(last: bool) -> None:
    packing = step(limit=1, packing=False)
    coming = items(3, 10 * CAPACITY, 4)
    assert packing.chunk(coming, last=last) == [[item] for item in coming]
    assert packing.chunk([], last=True) == []


@pytest.mark.req("PACK-01", "PACK-03", "PACK-05", "MET-03")
@given(
    st.lists(st.lists(LENGTHS, max_size=4), max_size=3),
    st.lists(LENGTHS, max_size=4),
    st.booleans(),
)
def test_every_segment_of_a_step_is_in_one_pack_at_the_place_that_is_told(
    chunks: list[list[int]], last: list[int], packing: bool
) -> None:
    fills: list[float] = []
    packer = step(limit=16, packing=packing, fills=fills)
    coming = items(*[length for chunk in [*chunks, last] for length in chunk])
    expected: dict[Item, Place] = {}
    packs = come = 0
    for number, chunk in enumerate([*chunks, last]):
        come, began = come + len(chunk), come
        for pack in packer.chunk(coming[began:come], last=number == len(chunks)):
            assert 0 < sum(map(len, pack)) <= CAPACITY
            for position, item in enumerate(pack):
                assert item not in expected
                expected[item] = Place(len(item), packs, position, come)
            packs += 1
    assert packer.places == [expected[item] for item in coming]
    total = sum(map(len, coming))
    fill = total / (packs * CAPACITY) if packs else 0.0
    assert packer.payload().metrics() == {
        "packing/post_rollout_fill": fill,
        "packing/post_rollout_segments": come,
        "packing/post_rollout_packs": packs,
        "packing/post_rollout_selected_total_len": total,
    }
    assert fills == [packer.fill] == [fill]


@pytest.mark.req("PACK-05", "MET-03")
def test_a_place_says_what_had_come_when_its_pack_was_made() -> None:
    packer = step(min_fill=0.7)
    first, second, third, fourth = items(12, 6, 8, 2)
    assert packer.chunk([first, second], last=False) == []
    assert packer.chunk([third], last=False) == [[first, third]]
    assert packer.chunk([fourth], last=True) == [[second, fourth]]
    assert packer.places == [
        Place(12, pack=0, position=0, come=3),
        Place(6, pack=1, position=0, come=4),
        Place(8, pack=0, position=1, come=3),
        Place(2, pack=1, position=1, come=4),
    ]


@pytest.mark.req("DDP-02")
def test_ranks_run_what_all_have_and_at_the_end_what_one_has_or_what_synchronizes() -> None:
    assert forwards_due([3, 1], [False, False], unsynced=False) == 1
    assert forwards_due([3, 2], [False, True], unsynced=True) == 2
    assert forwards_due([3, 0], [True, False], unsynced=True) == 0
    assert forwards_due([3, 0], [True, True], unsynced=True) == 3
    assert forwards_due([0, 0], [True, True], unsynced=True) == 1
    assert forwards_due([0, 0], [True, True], unsynced=False) == 0
