"""Which prediction is which ground truth (MATCH-01, MATCH-02).

candidates   per prediction, the few ground truths that are near
mask IoU     of each candidate pair, on a small canvas in norm1000 space (rasterize.py)
gate         pairs below it are infeasible, whatever else
assignment   Hungarian, with a dummy for every object so that any may stay alone
             (assignment.py)
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from learner.assignment import assign
from learner.config.rollout_matching import MatchingConfig
from learner.rasterize import BoolArray, FloatArray, PlainShape, Shapes, box_iou, mask_ious
from learner.types import MatchResult, Shape


class HasShape(Protocol):
    """A predicted or annotated object."""

    @property
    def shape(self) -> Shape:
        """Its geometry in norm1000 space."""


AnyShape = Shape | PlainShape | HasShape

MAX_RESOLUTION = 4096


def match_objects(
    predicted: Sequence[AnyShape], ground_truth: Sequence[AnyShape], config: MatchingConfig
) -> MatchResult:
    """Match P predictions to G ground truths; pairs come in order of the predictions.

    predicted, ground_truth: shapes, or objects that have one.
    """
    shapes, truths = _shapes(predicted), _shapes(ground_truth)
    near = candidates(shapes.boxes, truths.boxes, config.candidate_top_k)
    iou = mask_ious(shapes, truths, near, config.maskiou_resolution)
    cost = np.where(iou >= config.maskiou_gate, 1.0 - iou, np.inf)
    pairs = assign(cost, config.fp_cost, config.fn_cost)
    matched_predictions = {i for i, _ in pairs}
    matched_truths = {j for _, j in pairs}
    return MatchResult(
        pairs=pairs,
        false_positives=[i for i in range(len(predicted)) if i not in matched_predictions],
        false_negatives=[j for j in range(len(ground_truth)) if j not in matched_truths],
        gated=int(np.count_nonzero(iou < config.maskiou_gate)),
        mask_iou=iou,
    )


def mask_iou(a: AnyShape, b: AnyShape, resolution: int) -> float:
    """IoU of two shapes' masks on a canvas of `resolution` x `resolution` pixels.

    resolution: 2 to 4096, as in `MatchingConfig`; pycocotools counts pixels in 32 bits.
    A box whose corners are given the other way round is the box between them.
    """
    assert 2 <= resolution <= MAX_RESOLUTION, f"a canvas of {resolution} x {resolution} pixels"
    return float(mask_ious(_shapes([a]), _shapes([b]), np.full((1, 1), True), resolution)[0, 0])


def candidates(boxes: FloatArray, truth_boxes: FloatArray, top_k: int) -> BoolArray:
    """Which pairs (P, G) to compare: `top_k` ground truths for each prediction.

    boxes (P, 4), truth_boxes (G, 4): the bounding boxes. Taken are the truths of largest IoU
    or, for a prediction that overlaps none, of smallest distance between the centres; ties
    go to the lower index.
    """
    if top_k >= len(truth_boxes):
        return np.full((len(boxes), len(truth_boxes)), True)
    rank = -box_iou(boxes[:, None], truth_boxes)
    alone = ~rank.any(axis=1)
    rank[alone] = _distances(boxes[alone], truth_boxes)
    nearest = np.argsort(rank, axis=1, kind="stable")[:, :top_k]
    chosen = np.full(rank.shape, False)
    chosen[np.arange(len(boxes))[:, None], nearest] = True
    return chosen


def _distances(boxes: FloatArray, others: FloatArray) -> FloatArray:
    """(N, M) between the centres of boxes (N, 4) and (M, 4); squared, in half bins, exact."""
    x, y = (boxes[:, :2] + boxes[:, 2:]).T
    other_x, other_y = (others[:, :2] + others[:, 2:]).T
    squared: FloatArray = (x[:, None] - other_x) ** 2 + (y[:, None] - other_y) ** 2
    return squared


def _shapes(items: Sequence[AnyShape]) -> Shapes:
    return Shapes.of([item if isinstance(item, tuple) else item.shape for item in items])
