"""Whole logits, which the product never has: of a packed forward, and as what a reader reads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from learner.models.head import output_head
from learner.models.packed_forward import packed_forward
from learner.models.packs import Pack
from learner.objectives.logit_stats import HeadInput


def packed_logits(model: nn.Module, pack: Pack, embeddings: Tensor | None = None) -> Tensor:
    """Logits of every position of the pack, by the head as it is; (L, V)."""
    head: Any = output_head(model)
    found: Tensor = packed_forward(model, pack, lambda x: head.forward(x.hidden), embeddings)
    return found


def as_given(logits: Tensor) -> HeadInput:
    """Logits (L, V) as the input of a head that changes nothing."""
    return HeadInput(logits, lambda rows: rows, logits.shape[-1])


@contextmanager
def logits_through(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """What reads a forward reads `change` of the logits (1, L, V) of all its positions."""
    head: Any = output_head(model)
    plain = head.forward

    def before(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (change(plain(args[0])),)

    outer = vars(head).get("forward")
    head.forward = lambda rows: rows
    hook = head.register_forward_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()
        if outer is None:
            del head.forward
        else:
            head.forward = outer
