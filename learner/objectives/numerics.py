"""Gate arithmetic and its numerical limits, for training, metrics and rollouts.

The temperature divides logits first. Limits (LOSS-04): NaN becomes 0, infinities and large
values are clamped to +-1e4, and the text mass in the logarithm of `text_gate` is at least 1e-6.
"""

import torch
from torch import Tensor

LOGIT_LIMIT = 1e4
PROBABILITY_FLOOR = 1e-6


def is_on_cuda(tensor: Tensor) -> bool:
    """Return whether a tensor takes the code path of CUDA."""
    return tensor.is_cuda


def widened(logits: Tensor) -> Tensor:
    """Return float32 logits; float64 ones as they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


def bounded(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return finite float32 (or wider) logits, divided by `temperature`; same shape."""
    wide = widened(logits)
    scaled = wide if temperature == 1.0 else wide / temperature
    return torch.nan_to_num(scaled.clamp(-LOGIT_LIMIT, LOGIT_LIMIT))


def bound_(scaled: Tensor) -> Tensor:
    """Bound divided logits in place, without gradient, as `bounded` does."""
    return scaled.clamp_(-LOGIT_LIMIT, LOGIT_LIMIT).nan_to_num_()


def is_outside(scaled: Tensor) -> Tensor:
    """Return where the bounds replace divided logits, also NaN; same shape, bool."""
    return ~(scaled.abs() <= LOGIT_LIMIT)


def full_logsumexp(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the logsumexp of bounded logits; (..., V) -> (...)."""
    return torch.logsumexp(bounded(logits, temperature), dim=-1)


def logsumexp_and_text_mass_(scaled: Tensor, coord_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return `full_logsumexp` (r,) and the text mass (r,) of (r, V) bounded logits, in place.

    The text mass is the probability of all tokens that are no coordinates, in [0, 1]. It is a sum,
    because `1 - p_coord` has few digits if `p_coord` is near 1.
    """
    top = scaled.amax(-1, keepdim=True)
    exps = scaled.sub_(top).exp_()
    coord = exps.index_select(1, coord_ids).sum(-1)
    text = exps.index_fill_(1, coord_ids, 0.0).sum(-1)
    whole = text + coord
    return whole.log() + top.squeeze(-1), text / whole


def coord_log_probs(coord_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities over the coordinate bins; (..., 1000) -> (..., 1000)."""
    return torch.log_softmax(bounded(coord_logits, temperature), dim=-1)


def coord_gate(full_lse: Tensor, coord_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `-log p_coord` at coordinate slots, in nats.

    `logsumexp(full) - logsumexp(coord)`; (...) of `full_logsumexp` and (..., 1000) -> (...),
    >= 0 except for rounding.
    """
    return full_lse - full_logsumexp(coord_logits, temperature)


def coord_mass(full_lse: Tensor, coord_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the probability of all coordinate tokens, in [0, 1]; shapes as of `coord_gate`."""
    return (-coord_gate(full_lse, coord_logits, temperature)).exp()


def text_gate(text_mass: Tensor) -> Tensor:
    """Return `-log(1 - p_coord)` at text positions, in nats; (...) -> (...), in [0, 13.8].

    text_mass: `1 - p_coord`; at least 1e-6 counts.
    """
    return -text_mass.clamp_min(PROBABILITY_FLOOR).log()
