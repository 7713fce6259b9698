"""Candidates, the cheapest assignment, matches and masks (section 9 of the contract)."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pycocotools.mask as coco_mask
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from learner.config.rollout_matching import MatchingConfig
from learner.stages.matching import (
    MAX_RESOLUTION,
    PlainShape,
    Shapes,
    assign,
    candidates,
    exact_iou,
    mask_iou,
    mask_ious,
    match_objects,
)
from learner.types import GroundTruthObject, Shape

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


def near(predicted: list[Shape], truths: list[Shape], top_k: int) -> list[list[int]]:
    """The candidates of each prediction."""
    chosen = candidates(Shapes.of(predicted).boxes, Shapes.of(truths).boxes, top_k)
    return [np.flatnonzero(row).tolist() for row in chosen]


@pytest.mark.req("ARCH-02")
def test_plain_tuples_and_objects_are_shapes_too() -> None:
    cat = GroundTruthObject("cat", box(0, 0, 500, 500))
    assert mask_iou(("bbox_2d", [0, 0, 500, 500]), cat, 256) == 1.0
    assert match_objects([("bbox_2d", [0, 0, 500, 500])], [cat], MatchingConfig()).pairs == [(0, 0)]


# ---- candidates ----------------------------------------------------------------------


# Few places, so that overlaps and distances are often equal and boxes often points.
FEW_PLACES = st.sampled_from([0, 1, 100, 200, 300, 400, 999])


@pytest.mark.req("MATCH-01")
@example([box(0, 400, 10, 410)], [box(9, 0, 99, 9), box(20, 420, 99, 499)], 1)  # y decides
@given(
    st.lists(boxes(FEW_PLACES), max_size=4),
    st.lists(boxes(FEW_PLACES), max_size=6),
    st.integers(1, 7),
)
def test_candidates_are_the_first_of_all_truths_sorted(
    predicted: list[Shape], truths: list[Shape], top_k: int
) -> None:
    expected = []
    for shape in predicted:
        overlaps = [box_overlap(shape, truth) for truth in truths]
        ranks = [-o for o in overlaps] if any(overlaps) else [distance(shape, t) for t in truths]
        order = sorted(range(len(truths)), key=lambda j, ranks=ranks: (ranks[j], j))  # type: ignore[misc]
        expected.append(sorted(order[:top_k]))
    assert near(predicted, truths, top_k) == expected


def box_overlap(a: Shape, b: Shape) -> Fraction:
    width = max(0, min(a.coords[2], b.coords[2]) - max(a.coords[0], b.coords[0]))
    height = max(0, min(a.coords[3], b.coords[3]) - max(a.coords[1], b.coords[1]))
    areas = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (a.coords, b.coords)]
    union = sum(areas) - width * height
    return Fraction(width * height, union) if union else Fraction(0)


def distance(a: Shape, b: Shape) -> int:
    """Four times the squared distance of the centres."""
    doubled = (a.coords[k] + a.coords[k + 2] - b.coords[k] - b.coords[k + 2] for k in (0, 1))
    return sum(offset**2 for offset in doubled)


@pytest.mark.req("MATCH-01")
@pytest.mark.parametrize("spread", [100, 900])
def test_of_many_equal_truths_the_first_are_candidates(spread: int) -> None:
    """spread: of the truths, which overlap the prediction or are apart from it."""
    truths = [box(x, 0, x + 50, 50) for x in (spread, spread - 50)] * 150
    assert near([box(20, 0, 90, 50)], truths, 10) == [list(range(1, 20, 2))]


# ---- the cheapest assignment with dummies --------------------------------------------

INF = float("inf")
# Many equal costs, and sums of two prices that equal a cost to the last bit.
COSTS = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, INF]), st.floats(0, 1))
PRICES = st.one_of(st.sampled_from([0.0, 0.125, 0.25, 0.375, 0.5, 1.0, 50.0]), st.floats(0, 2))
Matrix = npt.NDArray[np.float64]


@st.composite
def matrices(draw: st.DrawFn, largest: int = 4) -> Matrix:
    rows, columns = draw(st.integers(0, largest)), draw(st.integers(0, largest))
    costs = st.lists(COSTS, min_size=rows * columns, max_size=rows * columns)
    return np.array(draw(costs), dtype=np.float64).reshape(rows, columns)


def total(cost: Matrix, pairs: list[tuple[int, int]], fp_cost: float, fn_cost: float) -> float:
    n_predicted, n_truth = cost.shape
    alone: float = fp_cost * (n_predicted - len(pairs)) + fn_cost * (n_truth - len(pairs))
    return alone + sum(float(cost[pair]) for pair in pairs)


def cheapest(cost: Matrix, fp_cost: float, fn_cost: float) -> float:
    """Over every way to pair some predictions with some truths."""
    rows: list[list[float]] = cost.tolist()

    def rest(i: int, free: frozenset[int]) -> float:
        if i == len(rows):
            return fn_cost * len(free)
        paired = (rows[i][j] + rest(i + 1, free - {j}) for j in free if rows[i][j] < INF)
        return min([fp_cost + rest(i + 1, free), *paired])

    return rest(0, frozenset(range(cost.shape[1])))


@pytest.mark.req("MATCH-02")
@given(matrices(), PRICES, PRICES)
def test_no_assignment_is_cheaper(cost: Matrix, fp_cost: float, fn_cost: float) -> None:
    pairs = assign(cost, fp_cost, fn_cost)
    assert pairs == sorted(pairs)
    assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
    assert all(cost[i, j] < INF for i, j in pairs)
    best = cheapest(cost, fp_cost, fn_cost)
    assert total(cost, pairs, fp_cost, fn_cost) == pytest.approx(best, rel=1e-12, abs=1e-12)


@pytest.mark.req("MATCH-02")
@given(matrices(), st.sampled_from([1e15, 1e17, 1e300]), PRICES, st.booleans())
def test_a_price_beyond_all_bounds_pairs_as_many_as_it_can_and_those_well(
    cost: Matrix, huge: float, other: float, of_truths: bool
) -> None:
    pairs = assign(cost, other, huge) if of_truths else assign(cost, huge, other)
    best = cheapest(cost, 100.0, 100.0)
    assert total(cost, pairs, 100.0, 100.0) == pytest.approx(best, rel=1e-12, abs=1e-12)


@pytest.mark.req("MATCH-02")
def test_assignments_by_hand() -> None:
    """A pair that costs more than both alone is none; where nothing is feasible all stay alone."""
    assert assign(np.array([[0.5]]), 0.25, 0.25 + 1e-12) == [(0, 0)]
    assert assign(np.array([[0.5]]), 0.25, 0.25 - 1e-12) == []
    for prices in ((0.0, 0.0), (1.0, 1.0), (1e300, 1e300)):
        assert assign(np.full((3, 2), INF), *prices) == []
    for size in ((0, 0), (0, 3), (3, 0)):
        assert assign(np.zeros(size), 1.0, 1.0) == []
    assert len(assign(np.full((6, 4), 0.5), 1.0, 1.0)) == 4


# ---- matching ------------------------------------------------------------------------


@pytest.mark.req("MATCH-02")
def test_a_pair_at_the_gate_is_feasible() -> None:
    predicted, truth = box(0, 0, 999, 999), box(0, 0, 333, 999)
    iou = mask_iou(predicted, truth, 256)
    assert match_objects([predicted], [truth], MatchingConfig(maskiou_gate=iou)).gated == 0
    above = MatchingConfig(maskiou_gate=float(np.nextafter(iou, 1)))
    assert match_objects([predicted], [truth], above).gated == 1


HOMES = (box(300, 300, 700, 700), poly(250, 250, 720, 280, 690, 740, 500, 500))
NEAR_HOME = st.lists(st.one_of(*map(moved, HOMES)), max_size=4)
CONFIGS = st.builds(
    MatchingConfig,
    candidate_top_k=st.sampled_from([1, 2, 10]),
    maskiou_gate=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    maskiou_resolution=st.just(32),
    fp_cost=st.sampled_from([0.0, 0.1, 1.0]),
    fn_cost=st.sampled_from([0.2, 1.0, 9.0]),
)


@pytest.mark.req("MATCH-01", "MATCH-02")
@pytest.mark.scenario("Pre-assignment gating prevents wrong matches and triggers FN append")
@given(NEAR_HOME, NEAR_HOME, CONFIGS)
def test_every_object_is_matched_once_or_left_alone_as_cheaply_as_the_gate_allows(
    predicted: list[Shape], truths: list[Shape], config: MatchingConfig
) -> None:
    result = match_objects(predicted, truths, config)
    wanted = near(predicted, truths, config.candidate_top_k)
    ious = np.full((len(predicted), len(truths)), np.nan)
    for i, candidate in enumerate(wanted):
        for j in candidate:
            ious[i, j] = coco_iou(predicted[i], truths[j], config.maskiou_resolution)
    assert np.array_equal(result.mask_iou, ious, equal_nan=True)
    cost = np.where(ious >= config.maskiou_gate, 1 - ious, INF)
    best = cheapest(cost, config.fp_cost, config.fn_cost)
    found = total(cost, result.pairs, config.fp_cost, config.fn_cost)
    assert found == pytest.approx(best, abs=1e-12)
    assert result.pairs == sorted(result.pairs)
    assert sorted([i for i, _ in result.pairs] + result.false_positives) == [*range(len(predicted))]
    assert sorted([j for _, j in result.pairs] + result.false_negatives) == [*range(len(truths))]
    assert result.false_positives == sorted(result.false_positives)
    assert result.false_negatives == sorted(result.false_negatives)
    assert result.gated == np.sum(ious < config.maskiou_gate)
    again = match_objects(predicted, truths, config)
    assert (again.pairs, again.gated) == (result.pairs, result.gated)
    assert np.array_equal(again.mask_iou, result.mask_iou, equal_nan=True)


# --- masks, against pycocotools ---------------------------------------------------------


RESOLUTIONS = [2, 3, 16, 100, 256, 999, 1024]
WHOLE = box(0, 0, 999, 999)


def all_ious(a: list[PlainShape], b: list[PlainShape], resolution: int) -> list[list[float]]:
    wanted = np.ones((len(a), len(b)), dtype=np.bool_)
    ious: list[list[float]] = mask_ious(Shapes.of(a), Shapes.of(b), wanted, resolution).tolist()
    return ious


@pytest.mark.req("MATCH-02")
def test_a_canvas_has_as_many_pixels_as_pycocotools_can_count() -> None:
    for resolution in (1, MAX_RESOLUTION + 1):
        with pytest.raises(AssertionError, match="pixels"):
            mask_iou(WHOLE, WHOLE, resolution)
        with pytest.raises(ValidationError, match="maskiou_resolution"):
            MatchingConfig(maskiou_resolution=resolution)
    whole = poly(0, 0, 999, 0, 999, 999, 0, 999)
    for resolution in (2, MAX_RESOLUTION):
        side = MatchingConfig(maskiou_resolution=resolution).maskiou_resolution
        assert mask_iou(whole, WHOLE, side) == 1.0


@pytest.mark.req("MATCH-02")
@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_a_box_with_an_edge_at_any_bin_is_that_of_pycocotools(resolution: int) -> None:
    bins = range(1000)
    ends = [*(box(0, 0, k, 999) for k in bins), *(box(0, 0, 999, k) for k in bins)]
    begins = [*(box(k, 0, 999, 999) for k in bins), *(box(0, k, 999, 999) for k in bins)]
    found = all_ious([*ends, *begins], [WHOLE], resolution)
    assert np.array_equal(found, coco_ious([*ends, *begins], [WHOLE], resolution))


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


@pytest.mark.req("MATCH-01")
def test_bounding_boxes_hold_every_point_of_a_shape() -> None:
    shapes: list[PlainShape] = [poly(5, 9, 3, 20, 8, 1), box(4, 3, 2, 1), box(-5, 0, 2000, 7)]
    assert Shapes.of(shapes).boxes.tolist() == [[3, 1, 8, 20], [2, 1, 4, 3], [0, 0, 999, 7]]


@pytest.mark.req("RES-20")
def test_a_shape_without_area_and_half_of_a_box_overlap_their_equals_alone() -> None:
    lines = [(10, 20, 10, 40), (10, 20, 10, 41)]
    thin = [GroundTruthObject("line", Shape("bbox_2d", coords)) for coords in lines]
    assert exact_iou(thin, thin, 64).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    halves = [poly(0, 0, 900, 0, 0, 900), poly(900, 0, 900, 900, 0, 900)]  # of one bounding box
    (own, other), _ = exact_iou(halves, halves, 64)
    assert (own, other < 0.1) == (1.0, True)
