"""Gate arithmetic and its numeric fences, one owner for training, metrics and rollouts.

Every function takes raw logits; the temperature divides them first. Fences (LOSS-04):
NaN becomes 0, infinities and large values are clamped to +-1e4, probabilities are
floored at 1e-6 where a logarithm follows.
"""

import torch
from torch import Tensor

LOGIT_LIMIT = 1e4
PROBABILITY_FLOOR = 1e-6


def fenced(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return finite float32 (or wider) logits, divided by `temperature`; same shape."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scaled = wide / temperature
    finite = torch.nan_to_num(scaled, nan=0.0, posinf=LOGIT_LIMIT, neginf=-LOGIT_LIMIT)
    return finite.clamp(-LOGIT_LIMIT, LOGIT_LIMIT)


def coord_log_probs(coord_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities over the coordinate bins; (..., 1000) -> (..., 1000)."""
    return torch.log_softmax(fenced(coord_logits, temperature), dim=-1)


def coord_gate(full_logits: Tensor, coord_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Mass that leaks out of the coordinate vocabulary at coordinate slots, in nats.

    `logsumexp(full) - logsumexp(coord)`; (..., V) and (..., 1000) -> (...), >= 0.
    """
    full = torch.logsumexp(fenced(full_logits, temperature), dim=-1)
    return full - torch.logsumexp(fenced(coord_logits, temperature), dim=-1)


def text_gate(full_logits: Tensor, coord_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Penalty on coordinate mass at text positions, in nats.

    `-log(1 - p_coord)` with the probability of text floored at 1e-6;
    (..., V) and (..., 1000) -> (...), in [0, 13.8].
    """
    leak = -coord_gate(full_logits, coord_logits, temperature)
    text_mass = (1.0 - leak.exp()).clamp_min(PROBABILITY_FLOOR)
    return -text_mass.log()
