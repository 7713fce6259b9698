"""Which samples each optimizer step takes, and each process of it: a pure function (STEP-02).

    step k  ->  `batch` samples of the epoch's order  ->  a contiguous share for each rank

An epoch has as many whole steps as its samples make; what is left over is not trained on in
that epoch. Any step's samples can be told at any time, so a run that goes on after it was
killed, or that looks ahead, takes the same ones.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ShareOrder:
    """The order of `samples` samples in steps of `batch`, over `ranks` processes.

    seed: of the shuffle; a new order in every epoch. shuffle: false keeps the order of the file.
    """

    samples: int
    batch: int
    ranks: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        assert self.batch % self.ranks == 0, "checked with the step budget"
        assert self.steps_per_epoch > 0, "checked with the step budget"

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch

    def share(self, step: int, rank: int) -> list[int]:
        """Indices of the samples of rank `rank` in step `step`, both from 0."""
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        own = self.batch // self.ranks
        start = in_epoch * self.batch + rank * own
        return [int(i) for i in _order(self, epoch)[start : start + own]]


@lru_cache(maxsize=4)
def _order(order: ShareOrder, epoch: int) -> npt.NDArray[np.int64]:
    if not order.shuffle:
        return np.arange(order.samples)
    return np.random.default_rng([order.seed, epoch]).permutation(order.samples)
