"""Channel A's self-context: the model reads its own coordinates and predicts them again (CHA-01).

    token ids ------------------> forward 0 -> coordinate logits
    coordinate logits -> context -> forward 1 -> coordinate logits
    ...                             forward n-1

Every forward is over the whole pack. A later forward gets the embeddings of the token ids, with
those of the coordinate slots replaced by embeddings of the previous forward's distributions.
Forwards between the first and the last compute the logits of coordinate slots alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from learner.config.schema import CoordContextMode, SoftContextGradMode
from learner.models.head import whole_model
from learner.models.packed_forward import packed_forward
from learner.models.packs import IMAGE, Pack
from learner.objectives.logit_stats import ForwardStats, HeadInput, Reader
from learner.objectives.numerics import coord_log_probs

T = TypeVar("T")


@dataclass(frozen=True)
class SelfContext:
    """The forwards of channel A, and the embeddings that it feeds back.

    iterations: forwards, >= 1.
    embed_mode: `soft`, the mean embedding of the distribution; `hard`, that of the likeliest bin;
        `st`, straight through: forward as `hard`, gradients as `soft`.
    grad_mode: `unroll` lets gradients flow through the fed-back embeddings, `em_detach` does not;
        the first forward keeps its gradient in both.
    """

    iterations: int = 1
    embed_mode: CoordContextMode = "st"
    grad_mode: SoftContextGradMode = "unroll"

    @property
    def recorded(self) -> int:
        """Number of forwards with a backward."""
        return self.iterations if self.grad_mode == "unroll" else min(self.iterations, 2)

    def forward_stats(self, model: nn.Module, pack: Pack, reader: Reader) -> ForwardStats:
        anchor = packed_forward(model, pack, reader.anchor)
        if self.iterations == 1:
            return ForwardStats(anchor, anchor)
        slots = anchor.slot_coord_logits
        with self._recording():
            for _ in range(self.iterations - 2):
                slots = self._forward(model, pack, reader.coord_ids, slots, reader.slots)
        final = self._forward(model, pack, reader.coord_ids, slots, reader.final)
        return ForwardStats(anchor, final)

    def _recording(self) -> AbstractContextManager[None]:
        return nullcontext() if self.grad_mode == "unroll" else torch.no_grad()

    def _forward(
        self,
        model: nn.Module,
        pack: Pack,
        coord_ids: Tensor,
        slots: Tensor,
        read: Callable[[HeadInput], T],
    ) -> T:
        """Return `read` of a forward with the context of (K, 1000) `slots` at its coordinates."""
        embedding = whole_model(model).get_input_embeddings()
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
    """Let the model recognize the image placeholders in `embeddings` (1, L, hidden).

    transformers compares each row, bit for bit, with the embedding of the single placeholder id.
    Rows of an embedding of L ids may differ from it: a LoRA product may round by its shape, and
    autocast applies inside the model only. So in the yielded embeddings every placeholder has the
    embedding of the single id, and within the block the comparison gets the same tensor.
    """
    is_image = pack.mm_token_types == IMAGE
    if not is_image.any():
        yield embeddings
        return
    token = pack.input_ids[is_image][0]
    with torch.no_grad():
        row: Tensor = embedding(token)

    def same_row(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        (ids,) = args
        return row.to(output.dtype) if ids.ndim == 0 and ids == token else output

    hook = embedding.register_forward_hook(same_row)
    try:
        yield torch.where(is_image[..., None], row.to(embeddings.dtype), embeddings)
    finally:
        hook.remove()


def context_embeddings(
    coord_logits: Tensor, bin_embeddings: Tensor, mode: CoordContextMode
) -> Tensor:
    """Return the embeddings at coordinate slots; (K, 1000), (1000, hidden) -> (K, hidden)."""
    log_probs = coord_log_probs(coord_logits)
    likeliest = bin_embeddings[log_probs.argmax(-1)]
    if mode == "hard":
        return likeliest
    mean = log_probs.exp() @ bin_embeddings.to(log_probs.dtype)
    if mode == "soft":
        return mean
    return likeliest.detach() + (mean - mean.detach())
