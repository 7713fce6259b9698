"""Masks and their IoU, against pycocotools."""

import numpy as np
import pycocotools.mask as coco_mask
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from learner.config.rollout_matching import MatchingConfig
from learner.stages.matching import MAX_RESOLUTION, PlainShape, Shapes, box_iou, mask_iou, mask_ious
from learner.types import Shape
from tests.unit.shapes import (
    BINS,
    PLACES,
    box,
    boxes,
    coco_iou,
    coco_ious,
    coco_mask_of,
    poly,
    polygons,
)

RESOLUTIONS = [2, 3, 16, 100, 256, 999, 1024]
WHOLE = box(0, 0, 999, 999)


def all_ious(a: list[PlainShape], b: list[PlainShape], resolution: int) -> list[list[float]]:
    wanted = np.ones((len(a), len(b)), dtype=np.bool_)
    ious: list[list[float]] = mask_ious(Shapes.of(a), Shapes.of(b), wanted, resolution).tolist()
    return ious


def edge(k: int, resolution: int) -> int:
    """Pixels before bin k: k (R - 1) / 999 to the nearest whole number, in integers."""
    return (2 * k * (resolution - 1) + 999) // 1998


# ---- what has no mask ----------------------------------------------------------------


@pytest.mark.req("MATCH-02")
@pytest.mark.parametrize(
    ("coords", "said"),
    [
        ((), "3 or more points, not 0$"),
        ((5, 5), "3 or more points, not 1$"),
        ((5, 5, 7, 7), "3 or more points, not 2$"),
        ((1, 2, 3, 4, 5, 6, 7), "7 values are no points$"),
    ],
)
def test_a_polygon_of_fewer_than_three_points_or_of_half_a_point_is_refused(
    coords: tuple[int, ...], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        mask_iou(Shape("poly", coords), WHOLE, 256)


@pytest.mark.req("MATCH-02")
@pytest.mark.parametrize("resolution", [1, 4097, 2**16 + 1])
def test_a_canvas_is_refused_that_pycocotools_cannot_count(resolution: int) -> None:
    with pytest.raises(AssertionError, match="pixels"):
        mask_iou(WHOLE, WHOLE, resolution)
    with pytest.raises(ValidationError, match="maskiou_resolution"):
        MatchingConfig(maskiou_resolution=resolution)


@pytest.mark.req("MATCH-02")
@pytest.mark.parametrize("resolution", [2, MAX_RESOLUTION])
def test_the_smallest_and_the_largest_canvas_are_drawn(resolution: int) -> None:
    whole = poly(0, 0, 999, 0, 999, 999, 0, 999)
    side = MatchingConfig(maskiou_resolution=resolution).maskiou_resolution
    assert mask_iou(whole, WHOLE, side) == 1.0


# ---- boxes ---------------------------------------------------------------------------


@pytest.mark.req("MATCH-02")
@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_a_box_begins_and_ends_at_the_pixel_edge_nearest_to_each_bin(resolution: int) -> None:
    bins, side = range(1000), resolution - 1
    edges = [edge(k, resolution) for k in bins]
    for shapes, covered in (
        ([box(0, 0, k, 999) for k in bins], edges),
        ([box(0, 0, 999, k) for k in bins], edges),
        ([box(k, 0, 999, 999) for k in bins], [side - e for e in edges]),
        ([box(0, k, 999, 999) for k in bins], [side - e for e in edges]),
    ):
        masks = [coco_mask_of(shape, resolution) for shape in shapes]
        assert [coco_mask.area(mask) for mask in masks] == [n * side for n in covered]
        theirs = coco_mask.iou(masks, [coco_mask_of(WHOLE, resolution)], [0])
        assert all_ious([*shapes], [WHOLE], resolution) == theirs.tolist()


# ---- any two shapes ------------------------------------------------------------------

BOXES = st.one_of(boxes(), boxes(PLACES), st.tuples(BINS, BINS, BINS, BINS).map(lambda c: box(*c)))
SHAPES = st.one_of(BOXES, polygons())


@pytest.mark.req("MATCH-02")
@given(
    st.lists(SHAPES, min_size=1, max_size=3),
    st.lists(SHAPES, min_size=1, max_size=3),
    st.sampled_from(RESOLUTIONS[:5]),
)
def test_boxes_and_polygons_overlap_as_in_pycocotools(
    a: list[PlainShape], b: list[PlainShape], resolution: int
) -> None:
    ours = all_ious(a, b, resolution)
    assert ours == coco_ious(a, b, resolution)
    assert ours == np.transpose(all_ious(b, a, resolution)).tolist()


@pytest.mark.req("MATCH-02")
@given(st.tuples(*[st.integers(-2000, 3000)] * 6), st.integers(2, 300))
def test_coordinates_are_clamped_before_anything_else(coords: list[int], side: int) -> None:
    inside = tuple(min(max(value, 0), 999) for value in coords)
    ring, corners = poly(*coords), box(*coords[:4])
    assert all_ious([ring, corners], [corners], side) == all_ious(
        [poly(*inside), box(*inside[:4])], [box(*inside[:4])], side
    )


# ---- what is computed ----------------------------------------------------------------


@pytest.mark.req("MATCH-01", "MATCH-02")
@given(st.data())
def test_only_the_wanted_pairs_have_a_value(data: st.DataObject) -> None:
    a, b = (data.draw(st.lists(SHAPES, max_size=3)) for _ in range(2))
    size = len(a) * len(b)
    flags = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    wanted = np.array(flags, dtype=np.bool_).reshape(len(a), len(b))
    ious = mask_ious(Shapes.of(a), Shapes.of(b), wanted, 16)
    assert np.array_equal(np.isnan(ious), ~wanted)
    assert ious[wanted].tolist() == [coco_iou(a[i], b[j], 16) for i, j in np.argwhere(wanted)]


@pytest.mark.req("MATCH-01")
def test_bounding_boxes_hold_every_point_of_a_shape() -> None:
    shapes: list[PlainShape] = [poly(5, 9, 3, 20, 8, 1), box(4, 3, 2, 1), box(-5, 0, 2000, 7)]
    assert Shapes.of(shapes).boxes.tolist() == [[3, 1, 8, 20], [2, 1, 4, 3], [0, 0, 999, 7]]
    assert Shapes.of([]).boxes.shape == (0, 4)


@pytest.mark.req("MATCH-01")
def test_the_iou_of_boxes_is_their_common_area_over_the_area_of_both() -> None:
    a = np.array([0.0, 0.0, 10.0, 10.0])
    others = np.array([[0, 0, 10, 10], [0, 0, 5, 10], [5, 5, 15, 15], [10, 0, 20, 10]], float)
    assert box_iou(a, others).tolist() == [1.0, 0.5, 25 / 175, 0.0]
    point = np.array([3.0, 3.0, 3.0, 3.0])
    assert box_iou(point, point) == 0.0
