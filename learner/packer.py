"""Segments of one step -> packs, at once or while more segments are on their way."""

import logging
from collections.abc import Callable, Sequence

from learner.config.training import TrainingConfig
from learner.metrics import Payload
from learner.model.packed_forward import Pack, Segment, make_pack
from learner.packing import StepPacking

_LOG = logging.getLogger(__name__)


class Packer:
    """Makes the packs of every step of one rank. capacity: tokens in a pack."""

    def __init__(self, training: TrainingConfig, capacity: int) -> None:
        self._training = training
        self._capacity = capacity
        self._warned = False

    def begin(self) -> "StepPacks":
        return StepPacks(self._training, self._capacity, self._warn_if_underfilled)

    def _warn_if_underfilled(self, fill: float) -> None:
        least = self._training.packing_min_fill_ratio
        if self._training.packing and 0 < fill < least and not self._warned:
            self._warned = True
            _LOG.warning(
                "packs are filled to %.0f %%, under training.packing_min_fill_ratio %.0f %%: "
                "a smaller global_max_length or a larger effective_batch_size fills them better "
                "(said once; see packing/post_rollout_fill)",
                100 * fill,
                100 * least,
            )


class StepPacks:
    """The packs of one step, and counts of them; nothing is carried over to the next one."""

    def __init__(
        self, training: TrainingConfig, capacity: int, check_fill: Callable[[float], None]
    ) -> None:
        self._capacity = capacity
        self._check_fill = check_fill
        self._packing = StepPacking[Segment](
            capacity,
            training.packing_buffer,
            training.packing_min_fill_ratio,
            packing=training.packing,
        )
        self._segments = self._packs = self._tokens = 0

    def add(self, segments: Sequence[Segment]) -> list[Pack]:
        """Full packs of what there is; the rest waits for more."""
        return self._made(self._packing.add(segments))

    def rest(self, segments: Sequence[Segment]) -> list[Pack]:
        """The last segments, and all that waits, in the fewest packs."""
        made = self._made(self._packing.rest(segments))
        self._check_fill(self._tokens / max(self._packs * self._capacity, 1))
        return made

    def payload(self) -> Payload:
        """Counts of all packs so far."""
        payload = Payload()
        room = self._packs * self._capacity
        payload.rate({"packing/post_rollout_fill": (self._tokens, room)})
        payload.add(
            {
                "packing/post_rollout_segments": self._segments,
                "packing/post_rollout_packs": self._packs,
                "packing/post_rollout_selected_total_len": self._tokens,
                "packing/post_rollout_buffer": 0,
            }
        )
        return payload

    def _made(self, packs: Sequence[Sequence[Segment]]) -> list[Pack]:
        self._packs += len(packs)
        self._segments += sum(map(len, packs))
        self._tokens += sum(len(segment) for pack in packs for segment in pack)
        return [make_pack(pack) for pack in packs]
