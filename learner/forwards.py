"""The forwards and backwards of one optimizer step, as many on every rank (DDP-02).

    packs, chunk by chunk -> ranks agree how many to run -> forward, backward ... -> one sync

Ranks have different numbers of packs. After every chunk all run as many as each of them has; at
the end as many as the one with the most, where the others replay a pack with weight zero. So
gradients are synchronized exactly once, in the last backward, and nobody waits for a forward
that does not come. Where the last chunk has no pack on any rank, all replay one to synchronize.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from learner.metrics import PhaseClock
from learner.model.packed_forward import Pack
from learner.packing import Chunk, forwards_due
from learner.peers import Peers

_NO_MORE: Chunk[Pack] = Chunk((), True)


class Engine(Protocol):
    """Who runs backwards and synchronizes gradients: an `accelerate.Accelerator`."""

    def backward(self, loss: Tensor) -> None: ...
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]: ...


class PlainEngine:
    """One process, without an accelerator."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


class Forwards:
    """Runs the packs of one step.

    pack_loss: the loss of one pack times its share of this rank's samples; a share of 0 is a
        replay, whose gradient is zero. spare: a pack to replay for a rank that has none.
    samples: of this rank. clock: takes the phases `wait` and `learn`.
    meanwhile: what this rank does while it waits for the others.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        peers: Peers,
        pack_loss: Callable[[Pack, float], Tensor],
        spare: Callable[[], Pack],
        samples: int,
        clock: PhaseClock,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        self._meanwhile = meanwhile
        self._model = model
        self._engine = engine
        self._peers = peers
        self._pack_loss = pack_loss
        self._spare = spare
        self._samples = samples
        self._clock = clock
        self._ready: deque[Pack] = deque()
        self._latest: Pack | None = None
        self._device = next(model.parameters()).device
        self._loss = torch.zeros((), device=self._device)
        self._unsynced = False
        self.replays = 0

    def run(self, chunks: Iterator[Chunk[Pack]]) -> Tensor:
        """Accumulate the gradients of all packs; returns this rank's loss, a detached scalar.

        Gradients are averaged over the ranks where they are synchronized, and ranks have
        equally many samples: so a rank's own shares make the loss of the whole step.
        """
        over = False
        while not over:
            over = self._take(chunks)
        return self._loss

    def _take(self, chunks: Iterator[Chunk[Pack]]) -> bool:
        """Run what all ranks can after one more chunk; true once that was the last."""

        def chunk() -> tuple[int, bool]:
            packs, last = next(chunks, _NO_MORE)
            self._ready.extend(packs)
            return len(self._ready), last

        with self._clock.phase("wait"):
            said = self._peers.share(chunk, self._meanwhile)
        counts, ended = zip(*said, strict=True)
        over = all(ended)
        for left in reversed(range(forwards_due(counts, ended, unsynced=self._unsynced))):
            self._forward(last=over and left == 0)
        return over

    def _forward(self, last: bool) -> None:
        pack, share = self._next()
        unsynced = nullcontext() if last else self._engine.no_sync(self._model)
        with self._clock.phase("learn"), unsynced:
            loss = self._pack_loss(pack.to(self._device), share)
            self._engine.backward(loss)
            if last and self._device.type == "cuda":  # else the clock stops before the backward
                torch.cuda.synchronize(self._device)
        self._unsynced = not last
        self._loss += loss.detach()

    def _next(self) -> tuple[Pack, float]:
        if self._ready:
            self._latest = self._ready.popleft()
            return self._latest, len(self._latest.sample_ids) / self._samples
        self.replays += 1
        if self._latest is None:
            self._latest = self._spare()
        return self._latest, 0.0
