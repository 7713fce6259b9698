"""Pairs of predictions and ground truths (MATCH-01, MATCH-02).

A mask is pycocotools' polygon of the shape on R x R pixels, the coordinates clamped to 0..999
and scaled by s = (R - 1) / 999. It never covers the last row and column. The mask of a shape
too thin for a pixel (for example a degenerate box) is empty. An empty mask has IoU 0 with every
mask, also with itself.

The mask of a box is known without drawing it. pycocotools' rleFrPoly sets a corner to the
fifth of a pixel X = floor(5 x s + 1/2) and starts column c between 5c + 2 and 5c + 3, so that
the first column of a box is floor((X1 + 2) / 5), which is floor(x1 s + 1/2), and its last the
one before floor(x2 s + 1/2); rows likewise. Bin x so ends up at its nearest pixel edge. There
are no ties to round: x s = n + 1/2 would make 2 x (R - 1), which is even, 999 (2n + 1).

The mask of a polygon lies within that of its bounding box. If the boxes of two shapes are apart,
neither shape is drawn.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pycocotools.mask as coco_mask
from scipy.optimize import linear_sum_assignment

from learner.config.rollout_matching import MatchingConfig
from learner.stages.tokens import COORD_BINS
from learner.types import (
    NEG_CATEGORIES,
    NOT_EXHAUSTIVE_CATEGORIES,
    GeometryKind,
    GroundTruthObject,
    MatchResult,
    ParsedObject,
    normalized,
)

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
PlainShape = tuple[GeometryKind, Sequence[int]]
Described = ParsedObject | GroundTruthObject
AnyShape = PlainShape | Described

MAX_RESOLUTION = 4096
# IoUs of a hit over which F1@mIoU is the mean (RES-20).
IOU_THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


@dataclass(frozen=True)
class Shapes:
    """boxes: (N, 4) of x1 <= x2 and y1 <= y2, the bounding boxes in 0..999. are_polygons: (N,)."""

    shapes: Sequence[PlainShape]
    boxes: FloatArray
    are_polygons: BoolArray

    @classmethod
    def of(cls, shapes: Sequence[PlainShape]) -> "Shapes":
        """Return the arrays of `shapes`; a polygon has 3 or more points."""
        corners = [coords if kind == "bbox_2d" else _extent(coords) for kind, coords in shapes]
        ends = np.array(corners, dtype=np.float64).reshape(len(shapes), 2, 2)
        ends = np.clip(ends, 0, COORD_BINS - 1)
        boxes = np.concatenate([ends.min(axis=1), ends.max(axis=1)], axis=1)
        return cls(shapes, boxes, np.array([kind == "poly" for kind, _ in shapes], np.bool_))


def match_objects(
    predicted: Sequence[AnyShape], ground_truth: Sequence[AnyShape], config: MatchingConfig
) -> MatchResult:
    """Match P predictions to G ground truths; pairs come in order of the predictions.

    Each prediction has its nearest ground truths as candidates, compared by their mask IoU. Pairs
    below the gate are not possible.
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
    """Return the IoU of two shapes' masks on a canvas of `resolution` x `resolution` pixels.

    resolution: 2 to 4096, as in `MatchingConfig`; pycocotools counts pixels in 32 bits.
    The corners of a box may have any order.
    """
    assert 2 <= resolution <= MAX_RESOLUTION, f"a canvas of {resolution} x {resolution} pixels"
    return float(mask_ious(_shapes([a]), _shapes([b]), np.full((1, 1), True), resolution)[0, 0])


def covers_a_pixel(shape: AnyShape, resolution: int) -> bool:
    """Return whether `mask_iou` of a shape with itself is above 0; a box is not drawn for it."""
    kind, coords = shape if isinstance(shape, tuple) else shape.shape
    if kind != "bbox_2d":
        return mask_iou(shape, shape, resolution) > 0
    scale = _scale(resolution)
    x1, y1, x2, y2 = (round(k * scale) for k in coords)
    return x1 != x2 and y1 != y2


def same_description(some: Sequence[Described], others: Sequence[Described]) -> BoolArray:
    """Return which pairs (P, G) have the same description in Unicode NFC (RES-20)."""
    names = np.array([normalized(item.desc) for item in some], dtype=object)
    other_names = np.array([normalized(item.desc) for item in others], dtype=object)
    alike: BoolArray = names[:, None] == other_names
    return alike


def candidates(boxes: FloatArray, truth_boxes: FloatArray, top_k: int) -> BoolArray:
    """Return which pairs (P, G) to compare: `top_k` ground truths for each prediction.

    boxes (P, 4), truth_boxes (G, 4): the bounding boxes. Chosen are the truths of the largest IoU
    or, for a prediction without overlap, of the smallest distance between the centres. Ties are
    broken by the lower index.
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
    """Return the squared distances (N, M) of the centres of boxes, in half bins, exact."""
    x, y = (boxes[:, :2] + boxes[:, 2:]).T
    other_x, other_y = (others[:, :2] + others[:, 2:]).T
    squared: FloatArray = (x[:, None] - other_x) ** 2 + (y[:, None] - other_y) ** 2
    return squared


def _shapes(items: Sequence[AnyShape]) -> Shapes:
    return Shapes.of([item if isinstance(item, tuple) else item.shape for item in items])


def assign(cost: npt.NDArray[np.float64], fp_cost: float, fn_cost: float) -> list[tuple[int, int]]:
    """Return the pairs (i, j) of the cheapest assignment, in order of i.

    cost: (P, G) of pairing prediction i with ground truth j, in [0, 1]; infinite for pairs that are
        not possible.
    fp_cost, fn_cost: of a prediction and of a ground truth without a partner.

    The Hungarian matrix is square, with P + G dummies: a prediction on a dummy is a false
    positive, a ground truth on a dummy a false negative, two dummies cost nothing.

                    truths     dummies                  truths          dummies
        predictions  cost      fp_cost    predictions   cost - fn_cost  fp_cost
        dummies      fn_cost   0

    The lower half adds fn_cost for each truth without a partner. To subtract fn_cost from each pair
    is equivalent: every assignment costs G * fn_cost less. So the matrix needs no rows of dummies.
    Of several cheapest assignments the solver always returns the same.
    """
    n_predicted, n_truth = cost.shape
    # With a price of P + G or more the most pairs win. A larger one only loses digits of the costs.
    highest = n_predicted + n_truth
    alone = np.full((n_predicted, n_predicted), min(fp_cost, highest))
    matrix = np.concatenate([cost - min(fn_cost, highest), alone], axis=1)
    _, columns = linear_sum_assignment(matrix)
    return [(i, j) for i, j in enumerate(columns.tolist()) if j < n_truth]


def most_pairs(iou: FloatArray, allowed: BoolArray) -> list[tuple[int, int]]:
    """Return the most pairs (p, g); of several pairings the one with the largest sum of IoUs.

    iou: (P, G). allowed: (P, G), the possible pairs.
    """
    alone = float(sum(iou.shape))  # more than all pairs together can differ in IoU
    return assign(np.where(allowed, 1.0 - iou, np.inf), alone, alone)


def left_open(desc: str, truths: Iterable[Described], lists: Mapping[str, Sequence[str]]) -> bool:
    """Return whether LVIS's lists allow such an object without an annotation."""
    name = normalized(desc)
    if name in lists.get(NOT_EXHAUSTIVE_CATEGORIES, ()):
        return True
    if NEG_CATEGORIES not in lists:
        return False
    return name not in lists[NEG_CATEGORIES] and all(normalized(o.desc) != name for o in truths)


def mask_ious(a: Shapes, b: Shapes, wanted: BoolArray, resolution: int) -> FloatArray:
    """Return the IoU (N, M) of the masks of `a` and `b`; NaN where `wanted` (N, M) is false."""
    scale = _scale(resolution)
    edges_a, edges_b = np.rint(a.boxes * scale), np.rint(b.boxes * scale)
    iou = np.where(wanted, box_iou(edges_a[:, None], edges_b), np.nan)
    unknown = (a.are_polygons[:, None] | b.are_polygons) & (iou > 0)
    rows, columns = np.flatnonzero(unknown.any(axis=1)), np.flatnonzero(unknown.any(axis=0))
    if len(rows):
        masks = (
            _rasterize([a.shapes[i] for i in rows], resolution),
            _rasterize([b.shapes[j] for j in columns], resolution),
        )
        drawn = np.full(iou.shape, np.nan)
        drawn[np.ix_(rows, columns)] = coco_mask.iou(*masks, [0] * len(columns))
        iou[unknown] = drawn[unknown]
    return iou


def exact_iou(
    predicted: Sequence[AnyShape], ground_truth: Sequence[AnyShape], resolution: int
) -> FloatArray:
    """Return the IoU (P, G) of every pair, as in evaluations (RES-20).

    The IoU of two boxes is exact. If one of them is a polygon, it is that of both masks on a canvas
    of `resolution`. A shape without area has IoU 1 with an equal shape, and 0 with all others.
    """
    a, b = _shapes(predicted), _shapes(ground_truth)
    iou = box_iou(a.boxes[:, None], b.boxes)
    drawn = (a.are_polygons[:, None] | b.are_polygons) & (iou > 0)
    if drawn.any():
        iou[drawn] = mask_ious(a, b, drawn, resolution)[drawn]
    for i, j in np.argwhere((a.boxes[:, None] == b.boxes).all(axis=2)).tolist():
        (kind, coords), (other, others) = a.shapes[i], b.shapes[j]
        if kind == other and tuple(coords) == tuple(others):
            iou[i, j] = 1.0
    return iou


def box_iou(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the IoU of boxes (..., 4) of whole numbers, broadcast; 0 if both are empty.

    It is the exact quotient, rounded once, so equal overlaps have equal IoUs.
    """
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    inter = np.maximum(width, 0) * np.maximum(height, 0)
    iou: FloatArray = inter / np.maximum(_area(a) + _area(b) - inter, 1)
    return iou


def _rasterize(shapes: Sequence[PlainShape], resolution: int) -> list[Any]:
    """Return pycocotools' run-length masks of at least one shape."""
    outlines = [_corners(coords) if kind == "bbox_2d" else coords for kind, coords in shapes]
    values = np.concatenate(outlines).clip(0, COORD_BINS - 1) * _scale(resolution)
    rest = iter(values.tolist())
    scaled = [list(islice(rest, len(outline))) for outline in outlines]
    masks: list[Any] = coco_mask.frPyObjects(scaled, resolution, resolution)
    return masks


def _corners(box: Sequence[int]) -> tuple[int, ...]:
    x1, y1, x2, y2 = box
    return (x1, y1, x2, y1, x2, y2, x1, y2)


def _scale(resolution: int) -> float:
    return (resolution - 1) / (COORD_BINS - 1)


def _extent(coords: Sequence[int]) -> tuple[int, int, int, int]:
    assert len(coords) >= 6, f"a polygon has 3 or more points, not {len(coords) // 2}"
    assert len(coords) % 2 == 0, f"{len(coords)} values are no points"
    xs, ys = coords[::2], coords[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def _area(boxes: FloatArray) -> FloatArray:
    area: FloatArray = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    return area
