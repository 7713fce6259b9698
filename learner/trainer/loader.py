"""Raw samples for the Trainer: one batch is this process's share of an optimizer step (RUN-02)."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset, Sampler

from learner.data.order import ShareOrder
from learner.types import Sample


class _Shares(Sampler[list[int]]):
    """Indices of one rank's shares, step by step through an epoch."""

    def __init__(self, order: ShareOrder, rank: int) -> None:
        self._order = order
        self._rank = rank
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self._epoch * len(self)
        return (self._order.share(first + step, self._rank) for step in range(len(self)))


class ShareLoader(DataLoader[Any]):
    """Shares of one rank, raw, in the order of the run; to be used without `accelerate.prepare`.

    When the Trainer skips what was trained on before a restart, it wraps the batch sampler,
    and goes on to find its `set_epoch`.
    """

    def __init__(self, samples: Sequence[Sample], order: ShareOrder, rank: int) -> None:
        self._shares = _Shares(order, rank)
        dataset = cast("Dataset[Sample]", samples)  # a sequence has all that is used of one
        super().__init__(dataset, batch_sampler=self._shares, collate_fn=list)

    def set_epoch(self, epoch: int) -> None:
        self._shares.set_epoch(epoch)
