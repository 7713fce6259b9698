"""Where each segment of a step went, against the packs that came out (MET-03, PACK-05)."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config.training import TrainingConfig
from learner.packing import CountedPacking, Place

CAPACITY = 100
CHUNKS = st.lists(st.lists(st.integers(1, CAPACITY), max_size=4), min_size=1, max_size=3)


@dataclass(frozen=True)
class Item:
    number: int
    length: int

    @property
    def sample_id(self) -> str:
        return "the same for all"

    def __len__(self) -> int:
        return self.length


def training(*, packing: bool) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "run_name": "counted",
            "output_dir": "nowhere",
            "learning_rate": 1e-3,
            "effective_batch_size": 4,
            "max_steps": 1,
            "packing": packing,
        }
    )


@pytest.mark.req("MET-03", "PACK-05")
@given(lengths=CHUNKS, packing=st.booleans())
def test_places_say_where_each_segment_is_in_the_packs(
    lengths: list[list[int]], packing: bool
) -> None:
    counted = CountedPacking[Item](training(packing=packing), CAPACITY)
    expected: dict[int, Place] = {}
    packs = come = 0
    for number, chunk in enumerate(lengths, start=1):
        items = [Item(come + i, length) for i, length in enumerate(chunk)]
        come += len(items)
        for pack in counted.chunk(items, last=number == len(lengths)):
            for position, item in enumerate(pack):
                expected[item.number] = Place(item.length, packs, position, come)
            packs += 1
    assert counted.places == [expected[number] for number in range(come)]
    metrics = counted.payload().metrics()
    total = sum(map(sum, lengths))
    assert metrics["packing/post_rollout_packs"] == packs
    assert metrics["packing/post_rollout_segments"] == come
    assert metrics["packing/post_rollout_selected_total_len"] == total
    assert counted.fill == metrics["packing/post_rollout_fill"]
    assert metrics["packing/post_rollout_fill"] == (total / (packs * CAPACITY) if packs else 0)


@pytest.mark.req("PACK-05")
def test_what_does_not_fill_a_pack_waits_for_the_last_chunk_and_then_nothing_waits() -> None:
    counted = CountedPacking[Item](training(packing=True), CAPACITY)
    first, second, third, fourth = (Item(i, length) for i, length in enumerate((60, 30, 40, 10)))
    assert counted.chunk([first, second], last=False) == []
    assert counted.chunk([third], last=False) == [[first, third]]
    assert counted.chunk([fourth], last=True) == [[second, fourth]]
    assert counted.places == [
        Place(60, pack=0, position=0, come=3),
        Place(30, pack=1, position=0, come=4),
        Place(40, pack=0, position=1, come=3),
        Place(10, pack=1, position=1, come=4),
    ]
    assert counted.payload().metrics() == {
        "packing/post_rollout_fill": 0.7,
        "packing/post_rollout_segments": 4,
        "packing/post_rollout_packs": 2,
        "packing/post_rollout_selected_total_len": 140,
        "packing/post_rollout_buffer": 0,
    }


def test_a_step_without_segments_has_no_places() -> None:
    counted = CountedPacking[Item](training(packing=True), CAPACITY)
    assert counted.chunk([], last=True) == []
    assert counted.places == []
    assert counted.fill == 0
