"""Shapes to match, and their mask IoU as pycocotools has it."""

from collections.abc import Sequence
from typing import Any

import pycocotools.mask as coco_mask
from hypothesis import strategies as st

from learner.stages.matching import PlainShape
from learner.types import Shape

# The borders of the canvas and bins side by side come up often.
BINS = st.one_of(st.integers(0, 999), st.sampled_from([0, 1, 2, 3, 4, 5, 500, 501, 998, 999]))
# So few places that points repeat, lie on one line, and edges cross.
PLACES = st.sampled_from([0, 200, 400, 401, 700, 999])


def box(x1: int, y1: int, x2: int, y2: int) -> Shape:
    return Shape("bbox_2d", (x1, y1, x2, y2))


def poly(*coords: int) -> Shape:
    return Shape("poly", coords)


def boxes(bins: st.SearchStrategy[int] = BINS) -> st.SearchStrategy[Shape]:
    """Boxes whose corners are in order, the degenerate ones too."""

    def ordered(corners: tuple[int, ...]) -> Shape:
        xs, ys = sorted(corners[::2]), sorted(corners[1::2])
        return box(xs[0], ys[0], xs[1], ys[1])

    return st.tuples(bins, bins, bins, bins).map(ordered)


def polygons() -> st.SearchStrategy[Shape]:
    def ring(bins: st.SearchStrategy[int]) -> st.SearchStrategy[Shape]:
        values = st.lists(bins, min_size=6, max_size=13)
        return values.map(lambda drawn: poly(*drawn[: len(drawn) // 2 * 2]))

    return st.one_of(ring(BINS), ring(PLACES))


def moved(shape: Shape) -> st.SearchStrategy[Shape]:
    """The shape somewhat elsewhere, so that it overlaps the given one more or less."""
    shifts = st.integers(-150, 150)

    def by(shift: tuple[int, int]) -> Shape:
        coords = (value + shift[i % 2] for i, value in enumerate(shape.coords))
        return Shape(shape.kind, tuple(min(max(value, 0), 999) for value in coords))

    return st.tuples(shifts, shifts).map(by)


def coco_mask_of(shape: PlainShape, resolution: int) -> Any:
    """Run-length mask of a shape, a box as its quadrilateral."""
    kind, outline = shape
    if kind == "bbox_2d":
        x1, y1, x2, y2 = outline
        outline = [x1, y1, x2, y1, x2, y2, x1, y2]
    scaled = [min(max(value, 0), 999) * ((resolution - 1) / 999) for value in outline]
    return coco_mask.merge(coco_mask.frPyObjects([scaled], resolution, resolution))


def coco_ious(
    a: Sequence[PlainShape], b: Sequence[PlainShape], resolution: int
) -> list[list[float]]:
    masks_a, masks_b = ([coco_mask_of(s, resolution) for s in shapes] for shapes in (a, b))
    ious: list[list[float]] = coco_mask.iou(masks_a, masks_b, [0] * len(b)).tolist()
    return ious


def coco_iou(a: PlainShape, b: PlainShape, resolution: int) -> float:
    return coco_ious([a], [b], resolution)[0][0]
