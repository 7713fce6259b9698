"""Gate arithmetic and its numerical limits, one owner for training, metrics and rollouts.

The temperature divides logits first. Limits (LOSS-04): NaN becomes 0, infinities and large
values are clamped to +-1e4, and the share of text under the logarithm of `text_gate` is at least
1e-6.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

LOGIT_LIMIT = 1e4
PROBABILITY_FLOOR = 1e-6

_AS_ON_CUDA: ContextVar[bool] = ContextVar("as_on_cuda", default=False)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Within the block the CPU's fake tensors take the way of CUDA's tensors."""
    token = _AS_ON_CUDA.set(True)
    try:
        yield
    finally:
        _AS_ON_CUDA.reset(token)


def counts_as_cuda() -> bool:
    """Whether tensors of the CPU take the way of CUDA's."""
    return _AS_ON_CUDA.get()


def widened(logits: Tensor) -> Tensor:
    """In float32, or wider as they came."""
    return logits if logits.dtype == torch.float64 else logits.float()


def bounded(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return finite float32 (or wider) logits, divided by `temperature`; same shape."""
    wide = widened(logits)
    scaled = wide if temperature == 1.0 else wide / temperature
    return torch.nan_to_num(scaled.clamp(-LOGIT_LIMIT, LOGIT_LIMIT))


def bound_(scaled: Tensor) -> Tensor:
    """As `bounded`, of logits divided already and without gradient, in their own memory."""
    return scaled.clamp_(-LOGIT_LIMIT, LOGIT_LIMIT).nan_to_num_()


def all_inside(scaled: Tensor) -> Tensor:
    """Whether `bound_` would change none of (r, V) divided logits; () bool."""
    least, most = torch.aminmax(scaled)
    return (least >= -LOGIT_LIMIT) & (most <= LOGIT_LIMIT)


def bounded_gradient(logits: Tensor, gradient: Tensor, temperature: float = 1.0) -> Tensor:
    """`gradient` where `bounded` passes a logit through, 0 where it replaces it; same shape."""
    inside = (widened(logits) / temperature).abs() <= LOGIT_LIMIT
    return gradient.masked_fill(~inside, 0.0)


def full_logsumexp(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Logsumexp of bounded logits; (..., V) -> (...)."""
    return torch.logsumexp(bounded(logits, temperature), dim=-1)


def logsumexp_and_text_mass_(scaled: Tensor, coord_ids: Tensor) -> tuple[Tensor, Tensor]:
    """`full_logsumexp` (r,) and the text mass (r,) of (r, V) bounded logits, in their own memory.

    The text mass is the share of the tokens that are no coordinates, in [0, 1]. It is summed, not
    1 less the share of the coordinates, which has few digits where the coordinates have nearly all.
    """
    top = scaled.amax(-1, keepdim=True)
    exps = scaled.sub_(top).exp_()
    coord = exps.index_select(1, coord_ids).sum(-1)
    text = exps.index_fill_(1, coord_ids, 0.0).sum(-1)
    whole = text + coord
    return whole.log() + top.squeeze(-1), text / whole


def coord_log_probs(coord_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities over the coordinate bins; (..., 1000) -> (..., 1000)."""
    return torch.log_softmax(bounded(coord_logits, temperature), dim=-1)


def coord_gate(full_lse: Tensor, coord_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Mass that leaks out of the coordinate vocabulary at coordinate slots, in nats.

    `logsumexp(full) - logsumexp(coord)`; (...) of `full_logsumexp` and (..., 1000) -> (...),
    >= 0 but for rounding.
    """
    return full_lse - full_logsumexp(coord_logits, temperature)


def coord_mass(full_lse: Tensor, coord_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Share of the coordinate tokens in the vocabulary; shapes as of `coord_gate`, in [0, 1]."""
    return (-coord_gate(full_lse, coord_logits, temperature)).exp()


def text_gate(text_mass: Tensor) -> Tensor:
    """Penalty on coordinate mass at text positions, in nats.

    `-log(1 - p_coord)` with `1 - p_coord`, the text mass, floored at 1e-6; shares of what is no
    coordinate in the vocabulary (...) -> (...), in [0, 13.8].
    """
    return -text_mass.clamp_min(PROBABILITY_FLOOR).log()
