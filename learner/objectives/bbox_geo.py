"""`bbox_geo`: SmoothL1 and CIoU on boxes decoded by expectation (LOSS-03)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.objectives.objective import LossMetrics, Objective, Term, Weight
from learner.types import COORD_BINS
from shared_contracts.strict_model import StrictModel

if TYPE_CHECKING:
    from torch import Tensor

    from learner.objectives.logit_stats import ForwardStats, Selection

EPS = 1e-7


class BboxGeoConfig(StrictModel):
    smoothl1_weight: Weight = Field(description="weight of SmoothL1 on the decoded coordinates")
    ciou_weight: Weight = Field(description="weight of CIoU on the decoded boxes")


class BboxGeoModule(Objective):
    """SmoothL1 (mean over the 4N values) and CIoU (mean over N) of the supervised boxes."""

    name: Literal["bbox_geo"] = Field(description="geometry of boxes decoded by expectation")
    config: BboxGeoConfig = Field(description="all its keys")

    metrics: ClassVar[LossMetrics] = {
        "coord": {
            "bbox_smoothl1": "SmoothL1 of decoded coordinates",
            "bbox_ciou": "complete-IoU loss of decoded boxes",
        }
    }

    @property
    def teaches(self) -> bool:
        return self.config.smoothl1_weight + self.config.ciou_weight > 0

    def terms(self, stats: ForwardStats, selection: Selection) -> Iterator[Term]:
        from torch.nn.functional import smooth_l1_loss

        if not len(selection.boxes):
            return
        config, count = self.config, selection.totals.boxes
        decoded = expected_coords(stats.final.slot_coord_logits)[selection.boxes]
        truth = (selection.slot_bins / (COORD_BINS - 1))[selection.boxes]
        if config.smoothl1_weight > 0:
            smooth = smooth_l1_loss(decoded, truth, reduction="sum") / (4 * count)
            yield Term("bbox_smoothl1", "coord", config.smoothl1_weight * smooth)
        if config.ciou_weight > 0:
            ciou = ciou_loss(decoded, truth).sum() / count
            yield Term("bbox_ciou", "coord", config.ciou_weight * ciou)


def expected_coords(coord_logits: Tensor) -> Tensor:
    """Decode `c = sum_k p(k) k/999`; (..., 1000) logits -> (...) in [0, 1]."""
    import torch

    from learner.objectives.numerics import coord_log_probs

    probs = coord_log_probs(coord_logits).exp()
    bins = torch.arange(COORD_BINS, device=probs.device, dtype=probs.dtype)
    return (probs * (bins / (COORD_BINS - 1))).sum(-1)


def _canonical(boxes: Tensor) -> Tensor:
    """Order corners by min/max and clamp to [0, 1]; (N, 4) -> (N, 4)."""
    import torch

    low = torch.minimum(boxes[:, :2], boxes[:, 2:])
    high = torch.maximum(boxes[:, :2], boxes[:, 2:])
    return torch.cat([low, high], dim=1).clamp(0.0, 1.0)


def ciou_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Return the complete-IoU loss per box, `1 - IoU + rho^2/c^2 + alpha v`; (N, 4) x 2 -> (N,).

    Boxes are x1, y1, x2, y2 in [0, 1]. Zheng et al., "Distance-IoU Loss", AAAI 2020
    (arXiv 1911.08287), equations 10 to 12; alpha is a constant for the gradient.
    """
    import torch

    p, t = _canonical(predicted), _canonical(target)
    p_size, t_size = p[:, 2:] - p[:, :2], t[:, 2:] - t[:, :2]
    overlap = (torch.minimum(p[:, 2:], t[:, 2:]) - torch.maximum(p[:, :2], t[:, :2])).clamp_min(0)
    intersection = overlap.prod(dim=1)
    union = p_size.prod(dim=1) + t_size.prod(dim=1) - intersection
    iou = intersection / (union + EPS)

    hull = torch.maximum(p[:, 2:], t[:, 2:]) - torch.minimum(p[:, :2], t[:, :2])
    centres = (p[:, :2] + p[:, 2:] - t[:, :2] - t[:, 2:]) / 2
    distance = centres.square().sum(dim=1) / (hull.square().sum(dim=1) + EPS)

    p_angle = torch.atan(p_size[:, 0] / (p_size[:, 1] + EPS))
    t_angle = torch.atan(t_size[:, 0] / (t_size[:, 1] + EPS))
    aspect = (4 / math.pi**2) * (t_angle - p_angle).square()
    alpha = (aspect / (1 - iou + aspect + EPS)).detach()
    return 1 - iou + distance + alpha * aspect
