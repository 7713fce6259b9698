"""Masks of shapes on a small canvas, and how much they overlap (MATCH-02).

A mask is pycocotools' polygon of the shape on R x R pixels, the coordinates clamped to 0..999
and scaled by s = (R - 1) / 999. It never covers the last row and column. The mask of a shape
too thin for a pixel (a degenerate box among them) is empty, and an empty mask has IoU 0 with
everything, itself too.

The mask of a box is known without drawing it. pycocotools' rleFrPoly sets a corner to the
fifth of a pixel X = floor(5 x s + 1/2) and starts column c between 5c + 2 and 5c + 3, so that
the first column of a box is floor((X1 + 2) / 5), which is floor(x1 s + 1/2), and its last the
one before floor(x2 s + 1/2); rows likewise. Bin x so ends up at its nearest pixel edge. There
are no ties to round: x s = n + 1/2 would make 2 x (R - 1), which is even, 999 (2n + 1).

The mask of a polygon lies within that of its bounding box. Where those of two shapes are apart,
the shapes are, and neither is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pycocotools.mask as coco_mask

from learner.coords import COORD_BINS
from learner.types import GeometryKind

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IndexArray = npt.NDArray[np.intp]
PlainShape = tuple[GeometryKind, Sequence[int]]


@dataclass(frozen=True)
class Shapes:
    """N shapes and what is known of them all at once.

    boxes: (N, 4) of x1, y1, x2, y2, the bounding boxes in 0..999; x1 <= x2 and y1 <= y2
        whatever a box said.
    are_polygons: (N,)
    """

    shapes: Sequence[PlainShape]
    boxes: FloatArray
    are_polygons: BoolArray

    @classmethod
    def of(cls, shapes: Sequence[PlainShape]) -> "Shapes":
        """These shapes; a polygon has 3 or more points."""
        corners = [coords if kind == "bbox_2d" else _extent(coords) for kind, coords in shapes]
        ends = np.array(corners, dtype=np.float64).reshape(len(shapes), 2, 2)
        ends = np.clip(ends, 0, COORD_BINS - 1)
        boxes = np.concatenate([ends.min(axis=1), ends.max(axis=1)], axis=1)
        return cls(shapes, boxes, np.array([kind == "poly" for kind, _ in shapes], np.bool_))


def mask_ious(a: Shapes, b: Shapes, wanted: BoolArray, resolution: int) -> FloatArray:
    """IoU (N, M) of the masks of shapes `a` with those of `b`; NaN where not `wanted` (N, M)."""
    scale = _scale(resolution)
    edges_a, edges_b = np.rint(a.boxes * scale), np.rint(b.boxes * scale)
    rows, columns = np.nonzero(wanted)
    found = box_iou(edges_a[rows], edges_b[columns])
    iou = np.full(wanted.shape, np.nan)
    iou[rows, columns] = found
    unknown = (a.are_polygons[rows] | b.are_polygons[columns]) & (found > 0)
    _draw(a.shapes, b.shapes, (rows[unknown], columns[unknown]), resolution, iou)
    return iou


def box_iou(a: FloatArray, b: FloatArray) -> FloatArray:
    """IoU of boxes (..., 4) of whole numbers, broadcast; 0 where both are empty.

    It is the exact quotient rounded once, so that equal overlaps are equal.
    """
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    inter = np.maximum(width, 0) * np.maximum(height, 0)
    iou: FloatArray = inter / np.maximum(_area(a) + _area(b) - inter, 1)
    return iou


def _draw(
    a: Sequence[PlainShape],
    b: Sequence[PlainShape],
    pairs: tuple[IndexArray, IndexArray],
    resolution: int,
    iou: FloatArray,
) -> None:
    """Set `iou` (N, M) of the pairs, drawing each of their shapes once."""
    rows, columns = pairs
    masks = {j: _rasterize(b[j], resolution) for j in set(columns.tolist())}
    for i in set(rows.tolist()):
        partners = columns[rows == i].tolist()
        mask = _rasterize(a[i], resolution)
        iou[i, partners] = coco_mask.iou([mask], [masks[j] for j in partners], [0] * len(partners))


def _rasterize(shape: PlainShape, resolution: int) -> Any:
    """Run-length mask of a shape, as pycocotools has it."""
    kind, coords = shape
    outline: Sequence[float] = coords
    if kind == "bbox_2d":
        x1, y1, x2, y2 = coords
        outline = (x1, y1, x2, y1, x2, y2, x1, y2)
    scale = _scale(resolution)
    scaled = [min(max(value, 0), COORD_BINS - 1) * scale for value in outline]
    return coco_mask.frPyObjects([scaled], resolution, resolution)[0]


def _scale(resolution: int) -> float:
    """Pixels per bin."""
    return (resolution - 1) / (COORD_BINS - 1)


def _extent(coords: Sequence[int]) -> tuple[int, int, int, int]:
    """Bounding box of a polygon."""
    assert len(coords) >= 6, f"a polygon has 3 or more points, not {len(coords) // 2}"
    assert len(coords) % 2 == 0, f"{len(coords)} values are no points"
    xs, ys = coords[::2], coords[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def _area(boxes: FloatArray) -> FloatArray:
    area: FloatArray = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    return area
