"""Channel A's self-context: the model reads its own coordinates and predicts them again (CHA-01).

    token ids ------------------> forward 0 -> coordinate logits
    coordinate logits -> context -> forward 1 -> coordinate logits
    ...                             forward n-1

Every forward is a full one over the whole pack. Each after the first has the embeddings of
the token ids with only those of the coordinate slots replaced, by what the forward before
expected there.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from learner.config.stage2_ab import CoordContextMode, SoftContextGradMode
from learner.losses.fences import coord_log_probs
from learner.losses.reading import Reader, Readings
from learner.model.packed_forward import Pack, packed_logits


@dataclass(frozen=True)
class SelfContext:
    """How often channel A forwards a pack, and what it feeds back.

    iterations: forwards, >= 1.
    embed_mode: `soft`, the mean embedding under the distribution; `hard`, the likeliest
        bin's; `st`, straight through: forward as `hard`, gradients as `soft`.
    grad_mode: `unroll` lets gradients flow through what is fed back, `em_detach` does not;
        the first forward keeps its gradient in both.
    """

    iterations: int = 1
    embed_mode: CoordContextMode = "st"
    grad_mode: SoftContextGradMode = "unroll"

    def readings(
        self, model: nn.Module, embedding: nn.Module, pack: Pack, reader: Reader
    ) -> Readings:
        """Run all forwards of a pack. embedding: the model's own, of token ids."""
        anchor = reader.anchor(packed_logits(model, pack))
        if self.iterations == 1:
            return Readings(anchor, anchor)
        slots = anchor.slot_coord_logits
        with self._recording():
            for _ in range(self.iterations - 2):
                slots = reader.slots(self._forward(model, embedding, pack, reader, slots))
        return Readings(anchor, reader.final(self._forward(model, embedding, pack, reader, slots)))

    def _recording(self) -> AbstractContextManager[None]:
        """Whether gradients are recorded of what is fed back, and of what only leads to it."""
        return nullcontext() if self.grad_mode == "unroll" else torch.no_grad()

    def _forward(
        self, model: nn.Module, embedding: nn.Module, pack: Pack, reader: Reader, slots: Tensor
    ) -> Tensor:
        """Logits (L, V) of the pack that reads (K, 1000) `slots` at its coordinates."""
        with self._recording():
            context = context_embeddings(slots, embedding(reader.coord_ids), self.embed_mode)
        base = embedding(pack.input_ids)
        positions = pack.supervision.coord_positions
        fed_back = base.index_copy(1, positions, context[None].to(base.dtype))
        return packed_logits(model, pack, fed_back)


def context_embeddings(
    coord_logits: Tensor, bin_embeddings: Tensor, mode: CoordContextMode
) -> Tensor:
    """What is read at coordinate slots; (K, 1000), (1000, hidden) -> (K, hidden)."""
    log_probs = coord_log_probs(coord_logits)
    likeliest = bin_embeddings[log_probs.argmax(-1)]
    if mode == "hard":
        return likeliest
    mean = log_probs.exp() @ bin_embeddings.to(log_probs.dtype)
    if mode == "soft":
        return mean
    return likeliest.detach() + (mean - mean.detach())
