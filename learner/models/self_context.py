"""Channel A's self-context: the model reads its own coordinates and predicts them again (CHA-01).

    token ids ------------------> forward 0 -> coordinate logits
    coordinate logits -> context -> forward 1 -> coordinate logits
    ...                             forward n-1

Every forward is one over the whole pack; those between the first and the last read the logits
of coordinate slots alone. Each after the first has the embeddings of the token ids with only
those of the coordinate slots replaced, by what the forward before expected there.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from learner.config.schema import CoordContextMode, SoftContextGradMode
from learner.models.packed_forward import packed_forward
from learner.models.packs import IMAGE, Pack
from learner.objectives.logit_stats import ForwardStats, HeadInput, Reader
from learner.objectives.numerics import coord_log_probs

T = TypeVar("T")


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

    @property
    def recorded(self) -> int:
        """How many of the forwards have a backward."""
        return self.iterations if self.grad_mode == "unroll" else min(self.iterations, 2)

    def forward_stats(
        self, model: nn.Module, embedding: nn.Module, pack: Pack, reader: Reader
    ) -> ForwardStats:
        """Run all forwards of a pack. embedding: the model's own, of token ids."""
        anchor = packed_forward(model, pack, reader.anchor)
        if self.iterations == 1:
            return ForwardStats(anchor, anchor)
        slots = anchor.slot_coord_logits
        with self._recording():
            for _ in range(self.iterations - 2):
                slots = self._forward(model, embedding, pack, reader.coord_ids, slots, reader.slots)
        final = self._forward(model, embedding, pack, reader.coord_ids, slots, reader.final)
        return ForwardStats(anchor, final)

    def _recording(self) -> AbstractContextManager[None]:
        """Whether gradients are recorded of what is fed back, and of what only leads to it."""
        return nullcontext() if self.grad_mode == "unroll" else torch.no_grad()

    def _forward(
        self,
        model: nn.Module,
        embedding: nn.Module,
        pack: Pack,
        coord_ids: Tensor,
        slots: Tensor,
        read: Callable[[HeadInput], T],
    ) -> T:
        """What `read` makes of a forward that reads (K, 1000) `slots` at its coordinates."""
        with self._recording():
            context = context_embeddings(slots, embedding(coord_ids), self.embed_mode)
        base = embedding(pack.input_ids)
        positions = pack.supervision.coord_positions
        fed_back = base.index_copy(1, positions, context[None].to(base.dtype))
        with _recognized_placeholders(embedding, pack, fed_back) as embeddings:
            return packed_forward(model, pack, read, embeddings)


@contextmanager
def _recognized_placeholders(
    embedding: nn.Module, pack: Pack, embeddings: Tensor
) -> Iterator[Tensor]:
    """`embeddings` (1, L, hidden), whose image placeholders the model finds while this is open.

    transformers looks for placeholders in embeddings by comparing each row, bit for bit, with
    the embedding of the placeholder's id alone. The rows of L ids need not equal that one: a
    LoRA product may round by its shape, and autocast holds inside the model only. So every
    placeholder gets the embedding of the id alone, and the comparison gets the same tensor.
    """
    is_image = pack.mm_token_types == IMAGE
    if not is_image.any():
        yield embeddings
        return
    token = pack.input_ids[is_image][0]
    with torch.no_grad():
        row: Tensor = embedding(token)

    def same_row(_: nn.Module, args: tuple[Tensor], found: Tensor) -> Tensor:
        (ids,) = args
        return row.to(found.dtype) if ids.ndim == 0 and ids == token else found

    hook = embedding.register_forward_hook(same_row)
    try:
        yield torch.where(is_image[..., None], row.to(embeddings.dtype), embeddings)
    finally:
        hook.remove()


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
