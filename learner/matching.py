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
from learner.rasterize import (
    BoolArray,
    FloatArray,
    PlainShape,
    bounding_boxes,
    box_iou,
    mask_ious,
)
from learner.types import MatchResult, Shape


class HasShape(Protocol):
    """A predicted or annotated object."""

    @property
    def shape(self) -> Shape:
        """Its geometry in norm1000 space."""


AnyShape = Shape | PlainShape | HasShape


def match_objects(
    predicted: Sequence[AnyShape], ground_truth: Sequence[AnyShape], config: MatchingConfig
) -> MatchResult:
    """Match P predictions to G ground truths; pairs come in order of the predictions.

    predicted, ground_truth: shapes, or objects that have one.
    """
    shapes, truths = _shapes(predicted), _shapes(ground_truth)
    near = candidates(shapes, truths, config.candidate_top_k)
    iou = mask_ious(shapes, truths, near, config.maskiou_resolution)
    cost = np.where(iou >= config.maskiou_gate, 1.0 - iou, np.inf)
    pairs = assign(cost, config.fp_cost, config.fn_cost)
    matched_predictions = {i for i, _ in pairs}
    matched_truths = {j for _, j in pairs}
    return MatchResult(
        pairs=pairs,
        false_positives=[i for i in range(len(shapes)) if i not in matched_predictions],
        false_negatives=[j for j in range(len(truths)) if j not in matched_truths],
        gated=int(np.count_nonzero(iou < config.maskiou_gate)),
        mask_iou=iou,
    )


def mask_iou(a: AnyShape, b: AnyShape, resolution: int) -> float:
    """IoU of two shapes' masks on a canvas of `resolution` x `resolution` pixels.

    A box whose corners are given the other way round is the box between them.
    """
    everything = np.ones((1, 1), dtype=np.bool_)
    return float(mask_ious(_shapes([a]), _shapes([b]), everything, resolution)[0, 0])


def candidates(
    predicted: Sequence[PlainShape], ground_truth: Sequence[PlainShape], top_k: int
) -> BoolArray:
    """Which pairs (P, G) to compare: `top_k` ground truths for each prediction.

    Those of largest IoU of the bounding boxes or, for a prediction that overlaps none, of
    smallest distance between their centres; ties go to the lower index.
    """
    if top_k >= len(ground_truth):
        return np.ones((len(predicted), len(ground_truth)), dtype=np.bool_)
    boxes, truth_boxes = bounding_boxes(predicted), bounding_boxes(ground_truth)
    rank = -box_iou(boxes[:, None], truth_boxes)
    alone = ~rank.any(axis=1)
    rank[alone] = _squared_distances(boxes[alone], truth_boxes)
    return _smallest(rank, top_k)


def _smallest(rank: FloatArray, top_k: int) -> BoolArray:
    """The `top_k` smallest of each row of (N, M), M > top_k, the first of equal ones."""
    last = np.partition(rank, top_k - 1, axis=1)[:, top_k - 1, None]
    below, tied = rank < last, rank == last
    room = top_k - below.sum(axis=1, keepdims=True)
    smallest: BoolArray = below | (tied & (tied.cumsum(axis=1) <= room))
    return smallest


def _squared_distances(boxes: FloatArray, others: FloatArray) -> FloatArray:
    """(N, M) between the centres of boxes (N, 4) and (M, 4); exact, of whole bins."""
    offset = _centres(boxes)[:, None] - _centres(others)
    squared: FloatArray = (offset**2).sum(axis=2)
    return squared


def _centres(boxes: FloatArray) -> FloatArray:
    """(N, 2) of x, y."""
    return (boxes[:, :2] + boxes[:, 2:]) / 2


def _shapes(items: Sequence[AnyShape]) -> list[PlainShape]:
    return [item if isinstance(item, tuple) else item.shape for item in items]
