"""The packs of a step: which segments share a forward (section 11 of the contract).

A segment is one whole sample, prompt and target; here only its length counts. `plan` maps lengths
to indices. This module holds the waiting segments of one step. Imports no torch.

    StepPacker      the waiting segments, the packs of one step, their metrics (PACK-05), and the
                    place of each segment (MET-03)
    forwards_due    the number of forwards that all ranks run next
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Generic, NamedTuple, Protocol, TypeVar

from learner.config.training import TrainingConfig
from learner.runs.metrics import Payload
from learner.stages.packing.plan import check_length, plan_packs, select_segments
from learner.types import Place


class Whole(Protocol):
    """A whole sample; its length is its tokens."""

    @property
    def sample_id(self) -> str: ...
    def __len__(self) -> int: ...


S = TypeVar("S", bound=Whole)
P = TypeVar("P")

# With less room a pack is full; with more it waits, if the shortest segment would fit.
_MOST_ROOM = 0.15


class Chunk(NamedTuple, Generic[P]):
    """Some packs of a step. last: the step has no more."""

    packs: Sequence[P]
    last: bool


class StepPacker(Generic[S, P]):
    """Divides the segments of one step into packs; no segment is left for the next step.

    With `training.packing: false` every segment is a pack of its own, of any length.

    capacity: tokens of a pack. make: makes a pack of segments.
    """

    def __init__(
        self,
        training: TrainingConfig,
        capacity: int,
        make: Callable[[list[S]], P],
    ) -> None:
        self._packing = training.packing
        self._min_fill = training.packing_min_fill_ratio
        self._capacity = capacity
        self._make = make
        self._waiting: list[tuple[int, S]] = []  # each segment with its number, from 0
        self._come = 0
        self._places: dict[int, Place] = {}
        self._packs = 0
        self._version: int | None = None

    def chunk(self, segments: Sequence[S], *, last: bool, version: int | None = None) -> list[P]:
        """Add a chunk of the step, and return the packs that can be made.

        Before the last chunk, packs are made while the waiting segments have the tokens of a whole
        pack and fill it, so far as they can. With the last chunk, all waiting segments share the
        fewest packs (`plan_packs`).

        version: of the weights that answered. A new one first finishes the packs of the version
        before: no pack mixes two.
        """
        finished: list[P] = []
        if self._version not in (None, version):
            finished = self.chunk([], last=True, version=self._version)
        self._version = version
        numbered = list(enumerate(segments, start=self._come))
        self._come += len(segments)
        packs = self._divide(numbered, last) if self._packing else [[each] for each in numbered]
        for pack in packs:
            for position, (number, segment) in enumerate(pack):
                place = Place(len(segment), self._packs, position, self._come)
                self._places[number] = place
            self._packs += 1
        return finished + [self._make([segment for _, segment in pack]) for pack in packs]

    def _divide(self, numbered: Sequence[tuple[int, S]], last: bool) -> list[list[tuple[int, S]]]:
        for each in numbered:
            check_length(len(each[1]), self._capacity, each[1].sample_id)
        self._waiting += numbered
        if last:
            return self._take(plan_packs(self._lengths(), self._capacity, self._min_fill))
        packs = []
        while sum(lengths := self._lengths()) >= self._capacity:
            plan = select_segments(lengths, self._capacity)
            room = self._capacity - sum(lengths[place] for place in plan)
            if room > _MOST_ROOM * self._capacity and room >= min(lengths):
                break  # a segment of a later chunk may fit
            packs += self._take([plan])
        return packs

    def _lengths(self) -> list[int]:
        return [len(segment) for _, segment in self._waiting]

    def _take(self, plan: Sequence[Sequence[int]]) -> list[list[tuple[int, S]]]:
        """Return the packs of places in `_waiting`, and remove their segments."""
        packs = [[self._waiting[place] for place in pack] for pack in plan]
        taken = set(chain.from_iterable(plan))
        self._waiting = [each for i, each in enumerate(self._waiting) if i not in taken]
        return packs

    @property
    def places(self) -> list[Place]:
        """The places of all segments, in the order of arrival; for use after the last chunk."""
        return [self._places[number] for number in range(self._come)]

    def payload(self) -> Payload:
        """Return the metrics of all packs so far."""
        payload = Payload()
        tokens = sum(place.length for place in self._places.values())
        room = self._packs * self._capacity
        payload.rate({"packing/post_rollout_fill": (tokens, room)})
        payload.add(
            {
                "packing/post_rollout_segments": len(self._places),
                "packing/post_rollout_packs": self._packs,
                "packing/post_rollout_selected_total_len": tokens,
            }
        )
        return payload


def forwards_due(ready: Sequence[int], over: Sequence[bool], unsynced: bool) -> int:
    """Return the number of forwards that every rank runs after the next chunk of each.

    ready: packs of each rank. over: ranks without further chunks. unsynced: gradients of this step
    are not synchronized yet. The result is the smallest number of packs; after the last chunks of
    all ranks the largest, and at least 1 if gradients must be synchronized.
    """
    return max(*ready, int(unsynced)) if all(over) else min(ready)
