"""Whole logits, which the product never has: of a packed forward, and as what a reader reads."""

from typing import Any

from torch import Tensor, nn

from learner.models.head import output_head
from learner.models.packed_forward import packed_forward
from learner.models.packs import Pack
from learner.objectives.logit_stats import HeadInput


def packed_logits(model: nn.Module, pack: Pack, embeddings: Tensor | None = None) -> Tensor:
    """Logits of every position of the pack, by the head as it is; (L, V)."""
    head = output_head(model)
    plain: Any = type(head).forward
    found: Tensor = packed_forward(model, pack, lambda x: plain(head, x.hidden), embeddings)
    return found


def as_given(logits: Tensor) -> HeadInput:
    """Logits (L, V) as the input of a head that changes nothing."""
    return HeadInput(logits, lambda rows: rows, logits.shape[-1])
