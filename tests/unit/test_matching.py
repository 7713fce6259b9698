"""Matching by mask IoU (section 9 of the contract)."""

from itertools import permutations

import numpy as np
import pycocotools.mask as coco_mask
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config.rollout_matching import MatchingConfig
from learner.matching import candidate_pairs, mask_iou, match_objects
from learner.types import GroundTruthObject, Shape

COORDS = st.integers(0, 999)


def box(x1: int, y1: int, x2: int, y2: int) -> Shape:
    return Shape("bbox_2d", (x1, y1, x2, y2))


@st.composite
def boxes(draw: st.DrawFn) -> Shape:
    x1, x2 = sorted((draw(COORDS), draw(COORDS)))
    y1, y2 = sorted((draw(COORDS), draw(COORDS)))
    return box(x1, y1, x2, y2)


@st.composite
def polygons(draw: st.DrawFn) -> Shape:
    points = draw(st.lists(st.tuples(COORDS, COORDS), min_size=3, max_size=6))
    return Shape("poly", tuple(value for point in points for value in point))


def reference_iou(a: Shape, b: Shape, resolution: int) -> float:
    """pycocotools, called for this pair alone."""

    def mask(shape: Shape) -> object:
        outline = list(shape.coords)
        if shape.kind == "bbox_2d":
            x1, y1, x2, y2 = outline
            outline = [x1, y1, x2, y1, x2, y2, x1, y2]
        scaled = [min(max(value, 0), 999) * ((resolution - 1) / 999) for value in outline]
        return coco_mask.merge(coco_mask.frPyObjects([scaled], resolution, resolution))

    return float(coco_mask.iou([mask(a)], [mask(b)], [0])[0, 0])


# ---- mask IoU ------------------------------------------------------------------------


@pytest.mark.req("MATCH-02", "ARCH-02")
def test_halves_of_a_box_overlap_by_half() -> None:
    assert mask_iou(box(0, 0, 999, 999), box(0, 0, 999, 999), 256) == 1.0
    assert mask_iou(box(0, 0, 999, 999), box(0, 0, 333, 999), 1000) == pytest.approx(1 / 3)
    assert mask_iou(box(0, 0, 400, 400), box(500, 500, 900, 900), 256) == 0.0


@pytest.mark.req("MATCH-02")
def test_a_triangle_covers_half_of_its_box() -> None:
    triangle = Shape("poly", (0, 0, 999, 0, 0, 999))
    assert mask_iou(triangle, box(0, 0, 999, 999), 256) == pytest.approx(0.5, abs=0.01)


@pytest.mark.req("ARCH-02")
def test_plain_tuples_and_objects_are_shapes_too() -> None:
    cat = GroundTruthObject("cat", box(0, 0, 500, 500))
    assert mask_iou(("bbox_2d", [0, 0, 500, 500]), cat, 256) == 1.0
    assert match_objects([("bbox_2d", [0, 0, 500, 500])], [cat], MatchingConfig()).pairs == [(0, 0)]


@pytest.mark.req("MATCH-02")
def test_coordinates_are_clamped_to_the_canvas() -> None:
    assert mask_iou(("bbox_2d", (-50, -1, 2000, 1000)), box(0, 0, 999, 999), 256) == 1.0


@pytest.mark.req("MATCH-02")
@pytest.mark.parametrize("thin", [box(5, 5, 5, 5), box(100, 100, 100, 900), box(10, 10, 12, 12)])
def test_a_shape_too_thin_for_a_pixel_overlaps_nothing(thin: Shape) -> None:
    assert mask_iou(thin, thin, 256) == 0.0
    assert match_objects([thin], [thin], MatchingConfig()).pairs == []


@pytest.mark.req("MATCH-02")
@given(st.one_of(boxes(), polygons()), st.one_of(boxes(), polygons()), st.sampled_from([32, 256]))
def test_mask_iou_is_that_of_pycocotools(a: Shape, b: Shape, resolution: int) -> None:
    assert mask_iou(a, b, resolution) == reference_iou(a, b, resolution)
    assert mask_iou(a, b, resolution) == mask_iou(b, a, resolution)


# ---- candidates ----------------------------------------------------------------------


@pytest.mark.req("MATCH-01")
def test_candidates_are_the_truths_of_largest_box_iou() -> None:
    predicted = [box(0, 0, 100, 100)]
    truths = [box(0, 0, 10, 10), box(0, 0, 90, 90), box(0, 0, 50, 50), box(900, 900, 950, 950)]
    assert candidate_pairs(predicted, truths, 1) == [[1]]
    assert candidate_pairs(predicted, truths, 2) == [[1, 2]]
    assert candidate_pairs(predicted, truths, 9) == [[0, 1, 2, 3]]


@pytest.mark.req("MATCH-01")
def test_a_polygon_counts_with_its_bounding_box() -> None:
    triangle = Shape("poly", (0, 0, 100, 0, 0, 100))
    assert candidate_pairs([triangle], [box(0, 0, 40, 40), box(0, 0, 100, 100)], 1) == [[1]]


@pytest.mark.req("MATCH-01")
def test_where_no_box_overlaps_the_nearest_centres_are_taken() -> None:
    predicted = [box(0, 0, 10, 10), box(780, 780, 810, 810)]
    truths = [box(800, 800, 900, 900), box(20, 20, 30, 30), box(100, 100, 110, 110)]
    assert candidate_pairs(predicted, truths, 2) == [[1, 2], [0, 1]]


@pytest.mark.req("MATCH-01")
def test_ties_go_to_the_lower_index() -> None:
    same = [box(0, 0, 50, 50)] * 4
    assert candidate_pairs([box(0, 0, 100, 100)], same, 2) == [[0, 1]]
    many = [box(0, 0, 50, 50), box(0, 0, 40, 40)] * 50
    assert candidate_pairs([box(0, 0, 100, 100)], many, 3) == [[0, 2, 4]]
    far = [box(200, 0, 210, 10), box(0, 200, 10, 210), box(200, 0, 210, 10)]
    assert candidate_pairs([box(0, 0, 10, 10)], far, 2) == [[0, 1]]


@pytest.mark.req("MATCH-01", "ARCH-02")
def test_pairs_that_are_no_candidates_are_never_computed() -> None:
    predicted = [box(0, 0, 100, 100), box(500, 500, 600, 600)]
    truths = [box(500, 500, 610, 610), box(0, 0, 90, 90), box(0, 0, 80, 80)]
    result = match_objects(predicted, truths, MatchingConfig(candidate_top_k=1))
    assert np.isnan(result.mask_iou).tolist() == [[True, False, True], [False, True, True]]
    assert result.pairs == [(0, 1), (1, 0)]
    assert result.false_negatives == [2]


# ---- assignment ----------------------------------------------------------------------


@pytest.mark.req("MATCH-02", "ARCH-02")
def test_matched_false_and_missed_objects_are_told_apart() -> None:
    predicted = [box(700, 700, 900, 900), box(10, 10, 200, 200)]
    truths = [box(0, 0, 200, 200), box(300, 300, 500, 500)]
    result = match_objects(predicted, truths, MatchingConfig())
    assert (result.pairs, result.false_positives, result.false_negatives) == ([(1, 0)], [0], [1])
    assert result.gated == 3
    assert result.mask_iou.shape == (2, 2)


@pytest.mark.req("MATCH-02")
def test_a_prediction_below_the_gate_with_every_truth_stays_alone() -> None:
    predicted, truths = [box(0, 0, 400, 400)], [box(200, 200, 600, 600), box(300, 0, 700, 400)]
    assert all(0 < mask_iou(predicted[0], truth, 256) < 0.3 for truth in truths)
    # Even when staying alone costs more than any pair.
    result = match_objects(predicted, truths, MatchingConfig(fp_cost=50.0, fn_cost=50.0))
    assert (result.pairs, result.false_negatives, result.gated) == ([], [0, 1], 2)


@pytest.mark.req("MATCH-02")
def test_a_pair_at_the_gate_is_feasible() -> None:
    predicted, truth = box(0, 0, 999, 999), box(0, 0, 333, 999)
    iou = mask_iou(predicted, truth, 256)
    assert match_objects([predicted], [truth], MatchingConfig(maskiou_gate=iou)).gated == 0
    above = MatchingConfig(maskiou_gate=float(np.nextafter(iou, 1)))
    assert match_objects([predicted], [truth], above).gated == 1


@pytest.mark.req("MATCH-02")
def test_the_gate_keeps_a_poor_pair_from_forcing_a_better_one_apart() -> None:
    truths = [box(0, 0, 400, 400), box(100, 0, 500, 400)]
    predicted = [box(100, 0, 500, 400), box(600, 0, 1000, 400)]
    assert match_objects(predicted, truths, MatchingConfig()).pairs == [(0, 1)]


@pytest.mark.req("MATCH-02")
def test_cheap_dummies_leave_poor_pairs_unmatched() -> None:
    predicted, truths = [box(0, 0, 400, 400)], [box(0, 0, 400, 200)]
    assert match_objects(predicted, truths, MatchingConfig()).pairs == [(0, 0)]
    # A pair that costs 0.5 against one object alone on each side.
    for fp_cost, fn_cost, pairs in ((0.1, 0.35, []), (0.35, 0.1, []), (0.1, 0.45, [(0, 0)])):
        config = MatchingConfig(fp_cost=fp_cost, fn_cost=fn_cost)
        assert match_objects(predicted, truths, config).pairs == pairs


@pytest.mark.req("MATCH-02")
@pytest.mark.parametrize(("n_predicted", "n_truth"), [(0, 0), (0, 3), (3, 0)])
def test_without_predictions_or_truths_nothing_matches(n_predicted: int, n_truth: int) -> None:
    shape = box(0, 0, 500, 500)
    result = match_objects([shape] * n_predicted, [shape] * n_truth, MatchingConfig())
    assert result.pairs == []
    assert result.false_positives == list(range(n_predicted))
    assert result.false_negatives == list(range(n_truth))
    assert result.mask_iou.shape == (n_predicted, n_truth)


def near(shape: Shape) -> st.SearchStrategy[Shape]:
    """Boxes that overlap the given one more or less."""

    def moved(shift: tuple[int, int]) -> Shape:
        dx, dy = shift
        x1, y1, x2, y2 = shape.coords
        return box(*(min(max(v, 0), 999) for v in (x1 + dx, y1 + dy, x2 + dx, y2 + dy)))

    return st.tuples(st.integers(-150, 150), st.integers(-150, 150)).map(moved)


HOME = box(300, 300, 700, 700)


@pytest.mark.req("MATCH-02")
@settings(max_examples=60)
@given(
    st.lists(near(HOME), max_size=4),
    st.lists(near(HOME), max_size=4),
    st.sampled_from([0.3, 0.6]),
    st.sampled_from([1.0, 0.1]),
)
def test_no_other_assignment_costs_less(
    predicted: list[Shape], truths: list[Shape], gate: float, alone: float
) -> None:
    config = MatchingConfig(
        maskiou_gate=gate, maskiou_resolution=64, fp_cost=alone, fn_cost=2 * alone
    )
    result = match_objects(predicted, truths, config)

    def cost(pairs: list[tuple[int, int]]) -> float:
        total = alone * (len(predicted) - len(pairs)) + 2 * alone * (len(truths) - len(pairs))
        for i, j in pairs:
            iou = reference_iou(predicted[i], truths[j], 64)
            total += 1 - iou if iou >= gate else float("inf")
        return total

    slots = [*range(len(truths)), *[-1] * len(predicted)]
    best = min(
        cost([(i, j) for i, j in enumerate(chosen) if j >= 0])
        for chosen in set(permutations(slots, len(predicted)))
    )
    assert cost(result.pairs) == pytest.approx(best)


@pytest.mark.req("MATCH-02")
@settings(max_examples=40)
@given(st.lists(near(HOME), max_size=6), st.lists(near(HOME), max_size=6))
def test_the_result_is_complete_and_the_same_every_time(
    predicted: list[Shape], truths: list[Shape]
) -> None:
    first, second = (match_objects(predicted, truths, MatchingConfig()) for _ in range(2))
    assert first.pairs == second.pairs == sorted(first.pairs)
    assert sorted([i for i, _ in first.pairs] + first.false_positives) == [*range(len(predicted))]
    assert sorted([j for _, j in first.pairs] + first.false_negatives) == [*range(len(truths))]
    assert all(first.mask_iou[i, j] >= 0.3 for i, j in first.pairs)
    assert first.gated == int((first.mask_iou < 0.3).sum())
