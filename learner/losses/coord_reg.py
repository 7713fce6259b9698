"""`coord_reg`: losses on the distribution over the 1000 coordinate bins (LOSS-04)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from learner.config.pipeline import CoordRegConfig
from learner.coords import COORD_BINS
from learner.losses.fences import coord_gate, coord_log_probs, text_gate
from learner.losses.reading import Reading
from learner.losses.supervision import Selection
from learner.losses.term import Term


def soft_targets(bins: Tensor, sigma: float, truncate: int | None) -> Tensor:
    """Unimodal targets `q(k)` proportional to `exp(-((k - t)/sigma)^2 / 2)`.

    bins: (K,) targets t in [0, 999], in bins.
    truncate: zero beyond this many bins from t; None: never.
    Returns (K, 1000), rows sum to 1.
    """
    grid = torch.arange(COORD_BINS, device=bins.device, dtype=torch.float32)
    offset = (grid[None, :] - bins[:, None]).abs()
    exponent = -0.5 * (offset / sigma).square()
    if truncate is not None:
        exponent = exponent.masked_fill(offset > truncate, -torch.inf)
    return exponent.softmax(dim=1)


def wasserstein1(probs: Tensor, targets: Tensor) -> Tensor:
    """`sum |CDF_p - CDF_q| / 999` per row; (K, 1000) x 2 -> (K,) in [0, 1]."""
    return (probs.cumsum(-1) - targets.cumsum(-1)).abs().sum(-1) / (COORD_BINS - 1)


def _slot_terms(
    reading: Reading, selection: Selection, config: CoordRegConfig
) -> Iterator[tuple[str, float, Tensor]]:
    """(name, weight, value per slot) of each loss whose weight is not zero."""
    log_probs = coord_log_probs(reading.slot_coord_logits, config.temperature)
    if config.coord_ce_weight > 0:
        nearest = selection.slot_bins.round().long()
        hard = -log_probs.gather(1, nearest[:, None]).squeeze(1)
        yield "coord_ce", config.coord_ce_weight, hard
    if config.soft_ce_weight > 0 or config.w1_weight > 0:
        target = soft_targets(selection.slot_bins, config.target_sigma, config.target_truncate)
        if config.soft_ce_weight > 0:
            yield "coord_soft_ce", config.soft_ce_weight, -(target * log_probs).sum(-1)
        if config.w1_weight > 0:
            yield "coord_w1", config.w1_weight, wasserstein1(log_probs.exp(), target)
    if config.coord_gate_weight > 0:
        gate = coord_gate(reading.slot_lse, reading.slot_coord_logits, config.temperature)
        yield "coord_gate", config.coord_gate_weight, gate


def coord_reg(reading: Reading, selection: Selection, config: CoordRegConfig) -> list[Term]:
    """Terms at the supervised coordinate slots, and `text_gate` at the supervised text."""
    totals = selection.totals
    terms = []
    if len(selection.slot_rows):
        terms = [
            Term(name, "coord", weight * values.sum() / totals.slots)
            for name, weight, values in _slot_terms(reading, selection, config)
        ]
    if config.text_gate_weight > 0 and len(selection.text_rows):
        leak = text_gate(reading.text_mass)
        terms.append(Term("text_gate", "coord", config.text_gate_weight * leak.sum() / totals.text))
    return terms
