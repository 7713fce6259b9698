"""Segments of one step -> packs, at once or while more segments are on their way."""

import logging
from collections.abc import Callable, Sequence

from learner.config.training import TrainingConfig
from learner.metrics import Payload
from learner.model.packed_forward import Pack, Segment, make_pack
from learner.packing import CountedPacking, Place

_LOG = logging.getLogger(__name__)


class Packer:
    """Makes the packs of every step of one rank. capacity: tokens in a pack."""

    def __init__(self, training: TrainingConfig, capacity: int) -> None:
        self._training = training
        self._capacity = capacity
        self._warned = False

    def begin(self) -> "StepPacks":
        packing = CountedPacking[Segment](self._training, self._capacity)
        return StepPacks(packing, self._warn_if_underfilled)

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
        self, packing: CountedPacking[Segment], check_fill: Callable[[float], None]
    ) -> None:
        self._packing = packing
        self._check_fill = check_fill

    def chunk(self, segments: Sequence[Segment], *, last: bool) -> list[Pack]:
        """Packs that are made when a chunk of the step has come; after the last none waits."""
        packs = self._packing.chunk(segments, last=last)
        if last:
            self._check_fill(self._packing.fill)
        return [make_pack(pack) for pack in packs]

    @property
    def places(self) -> list[Place]:
        """Where each segment went, in the order in which they came, once none of them waits."""
        return self._packing.places

    def payload(self) -> Payload:
        """Counts of all packs so far."""
        return self._packing.payload()
