"""Time and memory of the objectives over given logits, ours and plain."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from learner.objectives.config import PipelineConfig
from learner.objectives.logit_stats import (
    ForwardStats,
    HeadInput,
    LogitStats,
    Selection,
    Supervision,
)
from learner.objectives.numerics import bounded, coord_mass, full_logsumexp
from learner.objectives.pipeline import Pipeline
from learner.types import Channel

# The canonical weights, and whatever is 0 there: every module, every term.
OBJECTIVE = PipelineConfig.model_validate(
    {
        "objective": [
            {
                "name": "token_ce",
                "enabled": True,
                "weight": 1.0,
                "channels": ["A", "B"],
                "config": {
                    "desc_ce_weight": 1.0,
                    "rollout_fn_desc_weight": 1.0,
                    "rollout_matched_prefix_struct_weight": 1.0,
                    "self_context_struct_ce_weight": 0.1,
                    "rollout_drop_invalid_struct_ce_multiplier": 1.5,
                },
            },
            {
                "name": "bbox_geo",
                "enabled": True,
                "weight": 1.0,
                "channels": ["A", "B"],
                "config": {"smoothl1_weight": 2.0, "ciou_weight": 0.2},
            },
            {
                "name": "coord_reg",
                "enabled": True,
                "weight": 1.0,
                "channels": ["A", "B"],
                "config": {
                    "coord_ce_weight": 0.02,
                    "soft_ce_weight": 0.1,
                    "w1_weight": 0.1,
                    "coord_gate_weight": 1.0,
                    "text_gate_weight": 0.1,
                    "temperature": 1.0,
                    "target_sigma": 2.0,
                    "target_truncate": 8,
                },
            },
        ],
        "diagnostics": [
            {
                "name": "coord_diag",
                "enabled": True,
                "weight": 1.0,
                "channels": ["A", "B"],
                "config": {},
            }
        ],
    }
)


@dataclass(frozen=True)
class Bench:
    folder: Path
    rounds: int


@dataclass(frozen=True)
class Cost:
    """seconds: of forward and backward. peak: bytes on top of what was there. gradient: (L, V)."""

    total: float
    seconds: float
    peak: int
    gradient: Tensor

    def free(self) -> None:
        """The memory of the gradient, which is a view."""
        self.gradient.untyped_storage().resize_(0)


def ours(pipeline: Pipeline, logits: Tensor, row: Supervision, channel: Channel) -> Cost:
    """The product's own objective over one forward's logits, (L, V)."""

    def loss(given: Tensor) -> Tensor:
        selection = pipeline.select(row, channel)
        whole = HeadInput(given, lambda rows: rows, given.shape[-1])
        stats = pipeline.reader(selection).anchor(whole)
        return pipeline(ForwardStats(stats, stats), selection, channel).total

    return _cost(loss, logits)


def plain(pipeline: Pipeline, logits: Tensor, row: Supervision, channel: Channel) -> Cost:
    """The same objective, with every row that a term needs taken from the logits, as written."""

    def loss(given: Tensor) -> Tensor:
        selection = pipeline.select(row, channel)
        stats = plain_stats(given, selection, pipeline.reader(selection).coord_ids)
        return pipeline(ForwardStats(stats, stats), selection, channel).total

    return _cost(loss, logits)


def plain_stats(logits: Tensor, selection: Selection, coord_ids: Tensor) -> LogitStats:
    """The statistics of (L, V) logits, each by its own formula."""
    text, slots = logits[selection.text_rows], logits[selection.slot_rows]
    return LogitStats(
        text_nll=F.cross_entropy(bounded(text), selection.text_targets, reduction="none"),
        text_mass=1.0 - coord_mass(full_logsumexp(text), text[:, coord_ids]),
        slot_lse=full_logsumexp(slots),
        slot_coord_logits=slots[:, coord_ids],
        departure_nll=F.cross_entropy(
            bounded(logits[selection.departure_rows]),
            selection.departure_tokens,
            reduction="none",
        ),
        kept_nll=F.cross_entropy(
            bounded(logits[selection.kept_rows]), selection.kept_tokens, reduction="none"
        ),
    )


def _cost(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Cost:
    given = logits.detach()[None].requires_grad_()
    gc.collect()
    before = _forget_peak()
    began = time.perf_counter()
    total = loss(given.squeeze(0))
    total.backward()
    seconds = time.perf_counter() - began
    assert given.grad is not None
    return Cost(total.item(), seconds, _peak() - before, given.grad.squeeze(0))


def forward_and_backward(forward: Callable[[], Tensor], gradient: Tensor) -> float:
    """Seconds of a model's forward to logits, (L, V), and of its backward from them."""
    began = time.perf_counter()
    logits = forward()
    torch.autograd.backward(logits, gradient)
    return time.perf_counter() - began


def _forget_peak() -> int:
    """Start the process's peak anew; returns its resident bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
