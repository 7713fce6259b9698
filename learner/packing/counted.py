"""The packs of one step, counted (PACK-05), and where each segment went (MET-03)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

from learner.config.training import TrainingConfig
from learner.metrics import Payload
from learner.packing.step import S, StepPacking


class Place(NamedTuple):
    """Where a segment of a step went.

    length: its tokens. pack: number of its pack, from 0, in the order in which they were made.
    position: in the pack, from 0. come: segments of the step that had come when that was made.
    """

    length: int
    pack: int
    position: int
    come: int


@dataclass(frozen=True)
class _Numbered(Generic[S]):
    number: int
    segment: S

    @property
    def sample_id(self) -> str:
        return self.segment.sample_id

    def __len__(self) -> int:
        return len(self.segment)


class CountedPacking(Generic[S]):
    """`StepPacking` as a run has it set up. capacity: tokens in a pack."""

    def __init__(self, training: TrainingConfig, capacity: int) -> None:
        self._capacity = capacity
        self._packing = StepPacking[_Numbered[S]](
            capacity,
            training.packing_buffer,
            training.packing_min_fill_ratio,
            packing=training.packing,
        )
        self._come = 0
        self._places: dict[int, Place] = {}
        self._packs = 0

    def chunk(self, segments: Sequence[S], *, last: bool) -> list[list[S]]:
        """Packs that are made when a chunk of the step has come; after the last none waits."""
        divide = self._packing.rest if last else self._packing.add
        return self._noted(divide(self._numbered(segments)))

    @property
    def places(self) -> list[Place]:
        """Of all segments in the order in which they came, once none of them waits."""
        return [self._places[number] for number in range(self._come)]

    @property
    def fill(self) -> float:
        """Tokens in the packs over the room in them."""
        return self._tokens / max(self._packs * self._capacity, 1)

    def payload(self) -> Payload:
        """Counts of all packs so far."""
        payload = Payload()
        room = self._packs * self._capacity
        payload.rate({"packing/post_rollout_fill": (self._tokens, room)})
        payload.add(
            {
                "packing/post_rollout_segments": len(self._places),
                "packing/post_rollout_packs": self._packs,
                "packing/post_rollout_selected_total_len": self._tokens,
                "packing/post_rollout_buffer": 0,
            }
        )
        return payload

    @property
    def _tokens(self) -> int:
        return sum(place.length for place in self._places.values())

    def _numbered(self, segments: Sequence[S]) -> list[_Numbered[S]]:
        first, self._come = self._come, self._come + len(segments)
        return [_Numbered(first + i, segment) for i, segment in enumerate(segments)]

    def _noted(self, packs: Sequence[Sequence[_Numbered[S]]]) -> list[list[S]]:
        for pack in packs:
            for position, item in enumerate(pack):
                place = Place(len(item), self._packs, position, self._come)
                self._places[item.number] = place
            self._packs += 1
        return [[item.segment for item in pack] for pack in packs]
