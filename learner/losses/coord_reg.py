"""`coord_reg`: losses on the distribution over the 1000 coordinate bins (LOSS-04)."""

import torch
from torch import Tensor

from learner.config.pipeline import CoordRegConfig
from learner.coords import COORD_BINS
from learner.losses.batch import LossBatch, Term
from learner.losses.fences import coord_gate, coord_log_probs, text_gate


def soft_targets(bins: Tensor, sigma: float, truncate: int | None) -> Tensor:
    """Unimodal targets `q(k)` proportional to `exp(-((k - t)/sigma)^2 / 2)`.

    bins: (K,) targets t in [0, 999], in bins.
    truncate: zero beyond this many bins from t; None: never.
    Returns (K, 1000), rows sum to 1.
    """
    grid = torch.arange(COORD_BINS, device=bins.device, dtype=torch.float32)
    offset = (grid[None, :] - bins[:, None]).abs()
    weight = torch.exp(-0.5 * (offset / sigma).square())
    if truncate is not None:
        weight = weight.masked_fill(offset > truncate, 0.0)
    return weight / weight.sum(dim=1, keepdim=True)


def wasserstein1(probs: Tensor, targets: Tensor) -> Tensor:
    """`sum |CDF_p - CDF_q| / 999` per row; (K, 1000) x 2 -> (K,) in [0, 1]."""
    return (probs.cumsum(-1) - targets.cumsum(-1)).abs().sum(-1) / (COORD_BINS - 1)


def _slot_terms(batch: LossBatch, config: CoordRegConfig) -> list[Term]:
    log_probs = coord_log_probs(batch.coord_logits, config.temperature)
    target = soft_targets(batch.coord_bins, config.target_sigma, config.target_truncate)
    target = target.to(log_probs.dtype)
    nearest = batch.coord_bins.round().long()
    hard = -log_probs.gather(1, nearest[:, None]).mean()
    soft = -(target * log_probs).sum(-1).mean()
    w1 = wasserstein1(log_probs.exp(), target).mean()
    gate = coord_gate(batch.coord_full_logits, batch.coord_logits, config.temperature).mean()
    return [
        Term("coord_ce", "coord", config.coord_ce_weight * hard),
        Term("coord_soft_ce", "coord", config.soft_ce_weight * soft),
        Term("coord_w1", "coord", config.w1_weight * w1),
        Term("coord_gate", "coord", config.coord_gate_weight * gate),
    ]


def coord_reg(batch: LossBatch, config: CoordRegConfig) -> list[Term]:
    """Terms at the supervised coordinate slots, and `text_gate` at the supervised text."""
    terms: list[Term] = []
    if batch.coord_bins.numel():
        terms += _slot_terms(batch, config)
    if batch.text_targets.numel():
        leak = text_gate(batch.text_logits, batch.text_coord_logits, config.temperature).mean()
        terms.append(Term("text_gate", "coord", config.text_gate_weight * leak))
    return terms or [Term("coord_ce", "coord", batch.coord_logits.sum() * 0.0)]
