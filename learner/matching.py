"""Which prediction is which ground truth (MATCH-01, MATCH-02).

    candidates   per prediction, the few ground truths that are near
    mask IoU     of each candidate pair, on a small canvas in norm1000 space
    gate         pairs below it are infeasible, whatever else
    assignment   Hungarian, with a dummy for every object so that any may stay alone

Masks are pycocotools' polygons. A shape too thin to cover a pixel of the canvas (a
degenerate box among them) has an empty mask, and an empty mask has IoU 0 with everything,
itself too: such an object is never matched.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pycocotools.mask as coco_mask
from scipy.optimize import linear_sum_assignment

from learner.config.rollout_matching import MatchingConfig
from learner.coords import COORD_BINS
from learner.types import GeometryKind, MatchResult, Shape

FloatArray = npt.NDArray[np.float64]
PlainShape = tuple[GeometryKind, Sequence[int]]


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
    iou = _candidate_mask_iou(_shapes(predicted), _shapes(ground_truth), config)
    feasible = iou >= config.maskiou_gate
    cost = np.where(feasible, 1.0 - iou, np.inf)
    pairs = _assign(cost, config.fp_cost, config.fn_cost)
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
    """IoU of two shapes' masks on a canvas of `resolution` x `resolution` pixels."""
    mask_a, mask_b = (_rasterize(shape, resolution) for shape in _shapes((a, b)))
    return float(coco_mask.iou([mask_a], [mask_b], [0])[0, 0])


def candidate_pairs(
    predicted: Sequence[PlainShape], ground_truth: Sequence[PlainShape], top_k: int
) -> list[list[int]]:
    """For each prediction the ground truths to compare it with, in ascending order.

    The `top_k` of largest box IoU, or of smallest distance between the centres where no
    box overlaps; ties go to the lower index.
    """
    boxes = _bounding_boxes(predicted)
    truth_boxes = _bounding_boxes(ground_truth)
    overlap = _box_iou(boxes, truth_boxes)
    offset = _centres(boxes)[:, None] - _centres(truth_boxes)[None]
    rank = np.where(overlap.any(axis=1, keepdims=True), -overlap, (offset**2).sum(axis=2))
    nearest = np.argsort(rank, axis=1, kind="stable")[:, :top_k]
    return [sorted(row) for row in nearest.tolist()]


def _candidate_mask_iou(
    predicted: Sequence[PlainShape], ground_truth: Sequence[PlainShape], config: MatchingConfig
) -> FloatArray:
    """Mask IoU (P, G), NaN where the pair is no candidate."""
    iou = np.full((len(predicted), len(ground_truth)), np.nan)
    if iou.size == 0:
        return iou
    side = config.maskiou_resolution
    masks = [_rasterize(shape, side) for shape in predicted]
    truth_masks = [_rasterize(shape, side) for shape in ground_truth]
    candidates = candidate_pairs(predicted, ground_truth, config.candidate_top_k)
    for i, near in enumerate(candidates):
        iou[i, near] = coco_mask.iou([masks[i]], [truth_masks[j] for j in near], [0] * len(near))
    return iou


def _assign(cost: FloatArray, fp_cost: float, fn_cost: float) -> list[tuple[int, int]]:
    """Cheapest assignment of the (P, G) cost matrix, infinite where infeasible.

    The matrix is made square with P + G dummies: a prediction on a dummy is a false
    positive, a ground truth on a dummy a false negative, two dummies cost nothing.
    """
    n_predicted, n_truth = cost.shape
    square = np.zeros((n_predicted + n_truth, n_predicted + n_truth))
    square[:n_predicted, :n_truth] = cost
    square[:n_predicted, n_truth:] = fp_cost
    square[n_predicted:, :n_truth] = fn_cost
    rows, columns = linear_sum_assignment(square)
    return [
        (int(i), int(j))
        for i, j in zip(rows, columns, strict=True)
        if i < n_predicted and j < n_truth
    ]


def _shapes(items: Sequence[AnyShape]) -> list[PlainShape]:
    return [item if isinstance(item, tuple) else item.shape for item in items]


def _rasterize(shape: PlainShape, resolution: int) -> Any:
    """Run-length mask of a shape, its coordinates clamped to 0..999 and scaled."""
    kind, coords = shape
    outline: Sequence[float] = coords
    if kind == "bbox_2d":
        x1, y1, x2, y2 = coords
        outline = (x1, y1, x2, y1, x2, y2, x1, y2)
    scale = (resolution - 1) / (COORD_BINS - 1)
    scaled = [min(max(value, 0), COORD_BINS - 1) * scale for value in outline]
    return coco_mask.frPyObjects([scaled], resolution, resolution)[0]


def _bounding_boxes(shapes: Sequence[PlainShape]) -> FloatArray:
    """(N, 4) of x1, y1, x2, y2."""
    points = [np.reshape(coords, (-1, 2)) for _, coords in shapes]
    return np.array([[*p.min(axis=0), *p.max(axis=0)] for p in points], dtype=np.float64)


def _centres(boxes: FloatArray) -> FloatArray:
    """(N, 2) of x, y."""
    return (boxes[:, :2] + boxes[:, 2:]) / 2


def _box_iou(a: FloatArray, b: FloatArray) -> FloatArray:
    """(N, M) IoU of boxes (N, 4) and (M, 4); 0 where both are empty."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    inter = np.clip(high - low, 0, None).prod(axis=2)
    area_a = (a[:, 2:] - a[:, :2]).prod(axis=1)
    area_b = (b[:, 2:] - b[:, :2]).prod(axis=1)
    union = area_a[:, None] + area_b[None] - inter
    iou: FloatArray = np.divide(inter, union, out=np.zeros_like(inter), where=union > 0)
    return iou
