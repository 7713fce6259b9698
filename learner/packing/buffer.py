"""Where segments wait for a pack (PACK-01)."""

from typing import Generic, TypeVar

from learner.packing.length import check_length
from learner.packing.plan import plan_packs
from learner.packing.select import select_segments
from shared_contracts.errors import ContractError

Segment = TypeVar("Segment")


class SegmentBuffer(Generic[Segment]):
    """Segments of one rank that wait for a pack; what a pack leaves over is carried on.

    capacity: tokens in a pack.
    limit: most segments that may wait (`training.packing_buffer`).
    """

    def __init__(self, capacity: int, limit: int) -> None:
        self._capacity = capacity
        self._limit = limit
        self._waiting: list[tuple[int, Segment]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Of all segments that wait."""
        return sum(length for length, _ in self._waiting)

    def add(self, segment: Segment, length: int, sample_id: str) -> None:
        """Let a segment wait; `ContractError` if it is too long or the buffer is full."""
        check_length(length, self._capacity, sample_id)
        if len(self._waiting) >= self._limit:
            raise ContractError(
                "training.packing_buffer",
                f"sample {sample_id} comes when {self._limit} segments already wait",
                "Raise training.packing_buffer or lower training.effective_batch_size",
            )
        self._waiting.append((length, segment))

    def take_pack(self) -> list[Segment]:
        """Segments of the next pack, oldest first; they leave the buffer."""
        chosen = select_segments([length for length, _ in self._waiting], self._capacity)
        return [self._waiting.pop(i)[1] for i in reversed(chosen)][::-1]

    def take_pool(self, min_fill: float) -> list[list[Segment]]:
        """All that waits, as the packs of `plan_packs`; the buffer is empty afterwards."""
        waiting, self._waiting = self._waiting, []
        plan = plan_packs([length for length, _ in waiting], self._capacity, min_fill)
        return [[waiting[i][1] for i in pack] for pack in plan]
