"""Which segments share a forward (section 11 of the contract).

A segment is one whole sample, prompt and target, and here anything with a length. `plan` decides,
lengths in and indices out; what waits is kept here, for one step at a time. Imports no torch.

    StepPacker      where segments wait (PACK-01), the packs of one step, counted (PACK-05), and
                    where each segment went (MET-03)
    Parts           packs of several versions of the weights, kept apart
    forwards_due    how many packs all ranks take on together
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from learner.config.training import TrainingConfig
from learner.runs.metrics import Payload
from learner.stages.packing.plan import check_length, plan_packs, select_segments
from learner.types import Place
from shared_contracts.errors import ContractError


class Whole(Protocol):
    """A whole sample, as long as its tokens."""

    @property
    def sample_id(self) -> str: ...
    def __len__(self) -> int: ...


S = TypeVar("S", bound=Whole)
P = TypeVar("P")


class Chunk(NamedTuple, Generic[P]):
    """Packs of a step that are there at once. last: the step has no more."""

    packs: Sequence[P]
    last: bool


class StepPacker(Generic[S, P]):
    """Divides the segments of one step into packs; nothing is carried over to the next step.

    With `training.packing: false` every segment is a pack of its own, however long.

    capacity: tokens in a pack. make: a pack of its segments.
    check_fill: takes `fill` when nothing waits any more.
    """

    def __init__(
        self,
        training: TrainingConfig,
        capacity: int,
        make: Callable[[list[S]], P],
        check_fill: Callable[[float], None] | None = None,
    ) -> None:
        self._packing = training.packing
        self._min_fill = training.packing_min_fill_ratio
        self._capacity = capacity
        self._make = make
        self._check_fill = check_fill
        self._limit = training.packing_buffer
        self._waiting: list[tuple[int, S]] = []  # each segment with its number, from 0
        self._come = 0
        self._places: dict[int, Place] = {}
        self._packs = 0

    def chunk(self, segments: Sequence[S], *, last: bool) -> list[P]:
        """Return the packs that can be made once this chunk of the step has arrived.

        Before the last chunk these are packs for as long as a whole pack of tokens waits. The
        last chunk and all segments that still wait share the fewest packs (`plan_packs`).
        """
        numbered = list(enumerate(segments, start=self._come))
        self._come += len(segments)
        packs = self._divide(numbered, last) if self._packing else [[each] for each in numbered]
        for pack in packs:
            for position, (number, segment) in enumerate(pack):
                place = Place(len(segment), self._packs, position, self._come)
                self._places[number] = place
            self._packs += 1
        if last and self._check_fill is not None:
            self._check_fill(self.fill)
        return [self._make([segment for _, segment in pack]) for pack in packs]

    def _divide(self, numbered: Sequence[tuple[int, S]], last: bool) -> list[list[tuple[int, S]]]:
        for each in numbered:
            check_length(len(each[1]), self._capacity, each[1].sample_id)
            if len(self._waiting) >= self._limit:
                raise ContractError(
                    "training.packing_buffer",
                    f"sample {each[1].sample_id} comes when {self._limit} segments already wait",
                    "Raise training.packing_buffer or lower training.effective_batch_size",
                )
            self._waiting.append(each)
        if last:
            return self._take(plan_packs(self._lengths(), self._capacity, self._min_fill))
        packs = []
        while sum(lengths := self._lengths()) >= self._capacity:
            packs += self._take([select_segments(lengths, self._capacity)])
        return packs

    def _lengths(self) -> list[int]:
        return [len(segment) for _, segment in self._waiting]

    def _take(self, plan: Sequence[Sequence[int]]) -> list[list[tuple[int, S]]]:
        """Return the packs of places in `_waiting`; their segments wait no more."""
        packs = [[self._waiting[place] for place in pack] for pack in plan]
        taken = set(chain.from_iterable(plan))
        self._waiting = [each for i, each in enumerate(self._waiting) if i not in taken]
        return packs

    @property
    def places(self) -> list[Place]:
        """Of all segments in the order in which they came, once none of them waits."""
        return [self._places[number] for number in range(self._come)]

    @property
    def fill(self) -> float:
        """Tokens in the packs over the room in them."""
        return self._tokens / max(self._packs * self._capacity, 1)

    @property
    def _tokens(self) -> int:
        return sum(place.length for place in self._places.values())

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
            }
        )
        return payload


@dataclass(frozen=True)
class Part(Generic[P]):
    """Packs of answers by one version of the weights, and by no other."""

    version: int
    packs: Sequence[P]


class Parts(Generic[P]):
    """Takes the segments of each round; has the parts when all rounds are over."""

    def __init__(self, packer: StepPacker[Any, P]) -> None:
        self._packer = packer
        self._over: list[Part[P]] = []
        self._version: int | None = None
        self._made: list[P] = []

    def add(self, version: int, segments: Sequence[Whole]) -> None:
        """A new version finishes the packs of the last one, however full: none mixes them."""
        if self._version not in (None, version):
            self._finish()
        self._version = version
        self._made += self._packer.chunk(segments, last=False)

    def finished(self) -> list[Part[P]]:
        """The parts, in order."""
        self._finish()
        return self._over

    def _finish(self) -> None:
        assert self._version is not None, "a share has samples"
        self._made += self._packer.chunk([], last=True)
        self._over.append(Part(self._version, self._made))
        self._made = []


def forwards_due(ready: Sequence[int], over: Sequence[bool], unsynced: bool) -> int:
    """Forwards that every rank runs after another chunk of each.

    ready: packs that each rank holds. over: ranks that will have no more. unsynced: gradients
    of this step wait to be synchronized. As many as all of them have; once all are over, as
    many as the one with the most, and at least the one that synchronizes.
    """
    return max(*ready, int(unsynced)) if all(over) else min(ready)
