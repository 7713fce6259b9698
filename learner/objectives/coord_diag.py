"""`coord_diag`: metrics of the coordinate distributions against the ground truth (LOSS-06).

They have no gradient and add to no loss. Every value is a sum over slots; it is divided by the
number of slots after the sums of packs and processes are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.objectives.objective import Diagnostic, SlotMetrics
from learner.types import COORD_BINS
from shared_contracts.strict_model import EmptySection

if TYPE_CHECKING:
    from learner.objectives.logit_stats import LogitStats, Selection

_TOP = 5


class CoordDiagModule(Diagnostic):
    """Metrics of slots; a target between two bins counts as its nearest bin.

    `expected_bin_mae` is the distance in bins of the distribution's mean to the target itself.
    `coord_mass_mean` is the probability of the coordinate tokens in the whole vocabulary, at the
    gates' temperature; all other metrics are at temperature 1.
    """

    name: Literal["coord_diag"] = Field(
        description="coordinate distributions against the ground truth; only monitored, not a loss"
    )
    config: EmptySection = Field(description="no keys: `{}`")

    metrics: ClassVar[SlotMetrics] = {
        "acc_top1": ("1", "coordinates whose likeliest bin is the ground truth's / coordinates"),
        "acc_top5": ("1", "coordinates whose five likeliest bins have that bin / coordinates"),
        "p_gt_mean": ("1", "mean probability of the ground truth's bin"),
        "expected_bin_mae": ("bins", "mean distance of the expected bin to the ground truth"),
        "entropy_mean": ("nats", "mean entropy of the distribution over the bins"),
        "coord_mass_mean": ("1", "mean probability of all coordinate tokens in the vocabulary"),
    }

    def sums(self, stats: LogitStats, selection: Selection, temperature: float) -> dict[str, float]:
        import torch

        from learner.objectives.numerics import coord_log_probs, coord_mass

        with torch.no_grad():
            log_probs = coord_log_probs(stats.slot_coord_logits)
            probs = log_probs.exp()
            truth = selection.slot_bins.round().long()[:, None]
            top = log_probs.topk(_TOP, dim=-1).indices
            mean = (probs * torch.arange(COORD_BINS, device=probs.device)).sum(-1)
            mass = coord_mass(stats.slot_lse, stats.slot_coord_logits, temperature)
            values = {
                "acc_top1": (top[:, :1] == truth).any(-1),
                "acc_top5": (top == truth).any(-1),
                "p_gt_mean": probs.gather(1, truth),
                "expected_bin_mae": (mean - selection.slot_bins).abs(),
                "entropy_mean": -(probs * log_probs).sum(-1),
                "coord_mass_mean": mass,
            }
            sums = torch.stack([value.sum().double() for value in values.values()])
        return dict(zip(values, sums.tolist(), strict=True))
