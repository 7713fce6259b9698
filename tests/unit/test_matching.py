"""Matching by mask IoU (section 9 of the contract)."""

from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config.rollout_matching import MatchingConfig
from learner.stages.matching import Shapes, candidates, mask_iou, match_objects
from learner.types import GroundTruthObject, MatchResult, Shape
from tests.unit.shapes import box, boxes, coco_iou, moved, poly


def near(predicted: list[Shape], truths: list[Shape], top_k: int) -> list[list[int]]:
    """The candidates of each prediction."""
    chosen = candidates(Shapes.of(predicted).boxes, Shapes.of(truths).boxes, top_k)
    return [np.flatnonzero(row).tolist() for row in chosen]


# ---- mask IoU ------------------------------------------------------------------------


@pytest.mark.req("MATCH-02", "ARCH-02")
def test_halves_of_a_box_overlap_by_half() -> None:
    assert mask_iou(box(0, 0, 999, 999), box(0, 0, 999, 999), 256) == 1.0
    assert mask_iou(box(0, 0, 999, 999), box(0, 0, 333, 999), 1000) == pytest.approx(1 / 3)
    assert mask_iou(box(0, 0, 400, 400), box(500, 500, 900, 900), 256) == 0.0


@pytest.mark.req("MATCH-02")
def test_a_triangle_covers_half_of_its_box() -> None:
    triangle = poly(0, 0, 999, 0, 0, 999)
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
def test_a_shape_too_thin_for_a_pixel_is_never_matched() -> None:
    thin = box(10, 10, 12, 12)
    assert mask_iou(thin, thin, 256) == 0.0
    result = match_objects([thin], [thin], MatchingConfig())
    assert (result.pairs, result.gated) == ([], 1)


# ---- candidates ----------------------------------------------------------------------


@pytest.mark.req("MATCH-01")
def test_candidates_are_the_truths_of_largest_box_iou() -> None:
    predicted = [box(0, 0, 100, 100)]
    truths = [box(0, 0, 10, 10), box(0, 0, 90, 90), box(0, 0, 50, 50), box(900, 900, 950, 950)]
    assert near(predicted, truths, 1) == [[1]]
    assert near(predicted, truths, 2) == [[1, 2]]
    assert near(predicted, truths, 9) == [[0, 1, 2, 3]]
    assert near(predicted, [], 9) == [[]]


@pytest.mark.req("MATCH-01")
def test_a_polygon_counts_with_its_bounding_box() -> None:
    triangle = poly(0, 0, 100, 0, 0, 100)
    assert near([triangle], [box(0, 0, 40, 40), box(0, 0, 100, 100)], 1) == [[1]]


@pytest.mark.req("MATCH-01")
def test_where_no_box_overlaps_the_nearest_centres_are_taken() -> None:
    predicted = [box(0, 0, 10, 10), box(780, 780, 810, 810)]
    truths = [box(800, 800, 900, 900), box(20, 20, 30, 30), box(100, 100, 110, 110)]
    assert near(predicted, truths, 2) == [[1, 2], [0, 1]]


@pytest.mark.req("MATCH-01")
def test_ties_go_to_the_lower_index() -> None:
    same = [box(0, 0, 50, 50)] * 4
    assert near([box(0, 0, 100, 100)], same, 2) == [[0, 1]]
    many = [box(0, 0, 50, 50), box(0, 0, 40, 40)] * 50
    assert near([box(0, 0, 100, 100)], many, 3) == [[0, 2, 4]]
    far = [box(200, 0, 210, 10), box(0, 200, 10, 210), box(200, 0, 210, 10)]
    assert near([box(0, 0, 10, 10)], far, 2) == [[0, 1]]


# Few places, so that overlaps and distances are often equal and boxes often points.
PLACES = st.sampled_from([0, 1, 100, 200, 300, 400, 999])


@pytest.mark.req("MATCH-01")
@given(st.lists(boxes(PLACES), max_size=4), st.lists(boxes(PLACES), max_size=6), st.integers(1, 7))
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
@pytest.mark.parametrize("top_k", [1, 10, 299])
def test_among_many_objects_ties_go_to_the_lower_index_too(top_k: int) -> None:
    rng = np.random.default_rng(7)

    def crowd(n: int, spread: int) -> list[Shape]:
        corners = rng.integers(0, spread, (n, 2)) * 40
        return [box(x, y, x + 80, y + 80) for x, y in corners.tolist()]

    predicted, truths = crowd(60, 23), crowd(300, 5)
    overlaps = [[float(box_overlap(a, b)) for b in truths] for a in predicted]
    assert not all(map(any, overlaps))
    ranks = [
        [-overlap for overlap in row] if any(row) else [float(distance(a, b)) for b in truths]
        for a, row in zip(predicted, overlaps, strict=True)
    ]
    expected = np.argsort(ranks, axis=1, kind="stable")[:, :top_k]
    assert near(predicted, truths, top_k) == np.sort(expected, axis=1).tolist()


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


def cheapest(
    predicted: list[Shape],
    allowed: list[list[tuple[int, float]]],
    n_truth: int,
    config: MatchingConfig,
) -> float:
    """Over every way to pair predictions with truths among those allowed, (index, cost)."""

    def rest(i: int, free: frozenset[int]) -> float:
        if i == len(predicted):
            return config.fn_cost * len(free)
        paired = (cost + rest(i + 1, free - {j}) for j, cost in allowed[i] if j in free)
        return min([config.fp_cost + rest(i + 1, free), *paired])

    return rest(0, frozenset(range(n_truth)))


def total_cost(result: MatchResult, config: MatchingConfig) -> float:
    return (
        sum(1 - float(result.mask_iou[pair]) for pair in result.pairs)
        + config.fp_cost * len(result.false_positives)
        + config.fn_cost * len(result.false_negatives)
    )


@pytest.mark.req("MATCH-01", "MATCH-02")
@given(NEAR_HOME, NEAR_HOME, CONFIGS)
def test_no_other_assignment_of_the_candidates_above_the_gate_costs_less(
    predicted: list[Shape], truths: list[Shape], config: MatchingConfig
) -> None:
    result = match_objects(predicted, truths, config)
    allowed: list[list[tuple[int, float]]] = []
    for shape, candidate in zip(
        predicted, near(predicted, truths, config.candidate_top_k), strict=True
    ):
        ious = {j: coco_iou(shape, truths[j], config.maskiou_resolution) for j in candidate}
        allowed.append([(j, 1 - iou) for j, iou in ious.items() if iou >= config.maskiou_gate])
    best = cheapest(predicted, allowed, len(truths), config)
    assert total_cost(result, config) == pytest.approx(best, abs=1e-12)
    assert all(j in dict(allowed[i]) for i, j in result.pairs)


@pytest.mark.req("MATCH-01", "MATCH-02")
@given(NEAR_HOME, NEAR_HOME, CONFIGS)
def test_every_object_is_matched_once_or_left_alone(
    predicted: list[Shape], truths: list[Shape], config: MatchingConfig
) -> None:
    result = match_objects(predicted, truths, config)
    assert result.pairs == sorted(result.pairs)
    assert sorted([i for i, _ in result.pairs] + result.false_positives) == [*range(len(predicted))]
    assert sorted([j for _, j in result.pairs] + result.false_negatives) == [*range(len(truths))]
    assert result.false_positives == sorted(result.false_positives)
    assert result.false_negatives == sorted(result.false_negatives)
    computed = ~np.isnan(result.mask_iou)
    wanted = near(predicted, truths, config.candidate_top_k)
    assert [np.flatnonzero(row).tolist() for row in computed] == wanted
    assert result.gated == np.sum(result.mask_iou[computed] < config.maskiou_gate)
    again = match_objects(predicted, truths, config)
    assert (again.pairs, again.gated) == (result.pairs, result.gated)
    assert np.array_equal(again.mask_iou, result.mask_iou, equal_nan=True)


@pytest.mark.req("MATCH-02")
@given(NEAR_HOME, NEAR_HOME, st.integers(0), st.sampled_from([0.1, 1.0]))
def test_neither_order_nor_sides_change_the_total_cost(
    predicted: list[Shape], truths: list[Shape], seed: int, fp_cost: float
) -> None:
    config = MatchingConfig(maskiou_resolution=32, fp_cost=fp_cost, fn_cost=0.5)
    cost = total_cost(match_objects(predicted, truths, config), config)
    random = Random(seed)
    shuffled, others = (random.sample(shapes, len(shapes)) for shapes in (predicted, truths))
    assert total_cost(match_objects(shuffled, others, config), config) == pytest.approx(cost)
    swapped = MatchingConfig(maskiou_resolution=32, fp_cost=0.5, fn_cost=fp_cost)
    other_way = match_objects(truths, predicted, swapped)
    assert total_cost(other_way, swapped) == pytest.approx(cost)
