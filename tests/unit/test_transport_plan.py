"""Barycentric projection of the Sinkhorn plan (section 9 of the contract).

Three references, none of them in the log domain: the textbook's scaling in float64, the same
in decimals of any magnitude, and the linear program that entropy blurs.
"""

import decimal
import itertools
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import linprog

from learner.config.rollout_matching import MatchingConfig
from learner.stages.matching import mask_iou
from learner.stages.transport_plan import (
    TransportCost,
    projected_bins,
    sinkhorn_barycentric,
    transport_shares,
)
from learner.types import Shape
from shared_contracts.errors import ContractError
from tests.unit.answers import ground_truths

FloatArray = npt.NDArray[np.float64]
Points = list[list[float]]

SQUARE = [[100.0, 100.0], [300.0, 100.0], [300.0, 300.0], [100.0, 300.0]]
TRIANGLE = [[100.0, 120.0], [310.0, 90.0], [220.0, 280.0]]

COSTS: st.SearchStrategy[TransportCost] = st.sampled_from(["l1", "l2"])
EPSILONS = st.floats(min_value=5e-324, max_value=sys.float_info.max)
MILD_EPSILONS = st.floats(min_value=1.0, max_value=1e6)
POINTS = st.lists(st.tuples(st.floats(0, 999), st.floats(0, 999)).map(list), min_size=1, max_size=6)
BINS = st.lists(
    st.tuples(st.integers(0, 999), st.integers(0, 999)).map(list), min_size=1, max_size=5
)
SHAPES = ground_truths(allow_poly=True).map(lambda item: item.shape)


def shares_of(
    pred: Points, truth: Points, cost: TransportCost, epsilon: float, iters: int
) -> FloatArray:
    """The plan of one pair."""
    pair = np.array(pred, dtype=np.float64), np.array(truth, dtype=np.float64)
    (shares,) = transport_shares([pair], cost, epsilon, iters)
    return shares


def bins_of(
    predicted: Shape, truth: Shape, cost: TransportCost, epsilon: float, iters: int
) -> tuple[float, ...]:
    """What one pair is taught."""
    (bins,) = projected_bins([(predicted, truth)], cost, epsilon, iters)
    return bins


def distances(pred: Points, truth: Points, cost: TransportCost) -> FloatArray:
    offset = np.asarray(pred)[:, None] - np.asarray(truth)[None]
    if cost == "l1":
        return np.asarray(np.abs(offset).sum(axis=2), dtype=np.float64)
    return np.asarray(np.hypot(offset[..., 0], offset[..., 1]), dtype=np.float64)


def textbook_projection(
    pred: FloatArray, truth: FloatArray, costs: FloatArray, epsilon: float, iters: int
) -> FloatArray:
    """Sinkhorn's scaling of exp(-C / epsilon), outside of the log domain."""
    kernel = np.exp(-costs / epsilon)
    v = np.ones(len(truth))
    for _ in range(iters):
        u = (1 / len(pred)) / (kernel @ v)
        v = (1 / len(truth)) / (kernel.T @ u)
    plan = u[:, None] * kernel * v[None]
    projected: FloatArray = (plan / plan.sum(axis=1, keepdims=True)) @ truth
    return projected


@pytest.mark.req("ARCH-02", "OT-01")
@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("iters", [1, 3, 200])
@pytest.mark.parametrize("epsilon", [50.0, 200.0, 5000.0])
def test_it_agrees_with_the_textbook(cost: TransportCost, iters: int, epsilon: float) -> None:
    pred, truth = np.array(SQUARE), np.array(TRIANGLE)
    expected = textbook_projection(pred, truth, distances(SQUARE, TRIANGLE, cost), epsilon, iters)
    found = sinkhorn_barycentric(pred, truth, cost, epsilon, iters)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.req("OT-01")
@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("epsilon", [1e-300, 1e-6, 1.0])
def test_equal_sets_stay_where_they_are_when_epsilon_is_small(
    cost: TransportCost, epsilon: float
) -> None:
    shuffled = [SQUARE[i] for i in (2, 0, 3, 1)]
    found = sinkhorn_barycentric(SQUARE, shuffled, cost, epsilon, 50)
    np.testing.assert_allclose(found, SQUARE)


@pytest.mark.req("OT-01")
@pytest.mark.parametrize("epsilon", [1e12, 1e300, sys.float_info.max])
def test_every_point_goes_to_the_mean_when_epsilon_is_huge(epsilon: float) -> None:
    found = sinkhorn_barycentric(SQUARE, TRIANGLE, "l2", epsilon, 50)
    np.testing.assert_allclose(found, np.tile(np.mean(TRIANGLE, axis=0), (4, 1)), rtol=1e-6)


@pytest.mark.req("OT-01")
def test_the_marginals_part_points_that_share_a_nearest_neighbour() -> None:
    """Costs 0 + 201 as paired below, 200 + 92 the other way round."""
    pred = [[100.0, 0.0], [120.0, 90.0]]
    truth = [[100.0, 0.0], [300.0, 0.0]]
    found = sinkhorn_barycentric(pred, truth, "l2", 5.0, 500)
    np.testing.assert_allclose(found, truth, atol=0.5)


@pytest.mark.req("OT-01")
@given(pred=POINTS, truth=POINTS, cost=COSTS, epsilon=EPSILONS, iters=st.integers(1, 20))
def test_the_projection_is_finite_and_inside_the_box_of_the_ground_truth(
    pred: Points, truth: Points, cost: TransportCost, epsilon: float, iters: int
) -> None:
    with np.errstate(invalid="raise", divide="raise", over="raise"):
        found = sinkhorn_barycentric(pred, truth, cost, epsilon, iters)
    assert found.shape == (len(pred), 2)
    assert found.dtype == np.float64
    assert np.isfinite(found).all()
    assert (found >= np.min(truth, axis=0) - 1e-9).all()
    assert (found <= np.max(truth, axis=0) + 1e-9).all()


# ---- against other ways to get there -------------------------------------------------


def decimal_projection(
    pred: Points, truth: Points, cost: TransportCost, epsilon: float, iters: int
) -> list[list[float]]:
    """Sinkhorn's scaling of exp(-C / epsilon) in decimals that neither underflow nor overflow."""
    costs = [[decimal_distance(p, g, cost) for g in truth] for p in pred]
    kernel = [[(-c / Decimal(epsilon)).exp() for c in row] for row in costs]
    v = [Decimal(1)] * len(truth)
    for _ in range(iters):
        u = [1 / (dot(row, v) * len(pred)) for row in kernel]
        v = [1 / (dot(column, u) * len(truth)) for column in zip(*kernel, strict=True)]
    projected = []
    for row in kernel:
        moments = [
            dot([k * Decimal(g[axis]) for k, g in zip(row, truth, strict=True)], v)
            for axis in (0, 1)
        ]
        projected.append([float(moment / dot(row, v)) for moment in moments])
    return projected


def dot(a: Sequence[Decimal], b: Sequence[Decimal]) -> Decimal:
    return sum((x * y for x, y in zip(a, b, strict=True)), start=Decimal(0))


def decimal_distance(p: list[float], g: list[float], cost: TransportCost) -> Decimal:
    dx, dy = abs(Decimal(p[0]) - Decimal(g[0])), abs(Decimal(p[1]) - Decimal(g[1]))
    return dx + dy if cost == "l1" else (dx * dx + dy * dy).sqrt()


@pytest.mark.req("OT-01")
@given(pred=BINS, truth=BINS, cost=COSTS, epsilon=st.floats(1e-3, 1e6), iters=st.integers(1, 5))
def test_it_agrees_with_decimals_of_any_magnitude(
    pred: Points, truth: Points, cost: TransportCost, epsilon: float, iters: int
) -> None:
    wide = decimal.Context(prec=28, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
    with decimal.localcontext(wide):
        expected = decimal_projection(pred, truth, cost, epsilon, iters)
    found = sinkhorn_barycentric(pred, truth, cost, epsilon, iters)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def optimal_cost(costs: FloatArray) -> float:
    """Least cost of a plan with marginals 1/P and 1/G, by linear programming."""
    n_pred, n_truth = costs.shape
    rows = np.kron(np.eye(n_pred), np.ones(n_truth))
    columns = np.kron(np.ones(n_pred), np.eye(n_truth))
    marginals = [1 / n_pred] * n_pred + [1 / n_truth] * n_truth
    best = linprog(costs.ravel(), A_eq=np.vstack([rows, columns]), b_eq=marginals)
    return float(best.fun)


@pytest.mark.req("OT-01")
@given(pred=BINS, truth=BINS, cost=COSTS)
def test_the_marginals_converge_and_entropy_costs_no_more_than_it_may(
    pred: Points, truth: Points, cost: TransportCost
) -> None:
    """A plan of least `cost - epsilon * entropy` costs at most `epsilon * log(min(P, G))` more
    than the optimum: both entropies lie between log(max(P, G)) and log(P * G)."""
    costs = distances(pred, truth, cost)
    epsilon = max(costs.max(), 1.0) / 2  # at which 30 rounds converge, whatever the points
    plan = shares_of(pred, truth, cost, epsilon, 30) / len(pred)
    np.testing.assert_allclose(plan.sum(axis=0), 1 / len(truth), atol=1e-6)
    np.testing.assert_allclose(plan.sum(axis=1), 1 / len(pred), atol=1e-12)
    spent, least = float((plan * costs).sum()), optimal_cost(costs)
    assert least - 1e-3 <= spent <= least + epsilon * np.log(min(plan.shape)) + 1e-3


@pytest.mark.req("OT-01")
@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("seed", range(4))
def test_as_epsilon_goes_to_0_the_plan_goes_to_that_of_the_linear_program(
    seed: int, cost: TransportCost
) -> None:
    rng = np.random.default_rng(seed)
    pred, truth = rng.integers(0, 1000, (4, 2)).tolist(), rng.integers(0, 1000, (3, 2)).tolist()
    costs = distances(pred, truth, cost)
    spent = [
        float((shares_of(pred, truth, cost, epsilon, 1000) * costs).sum()) / len(pred)
        for epsilon in (300.0, 100.0, 30.0, 10.0, 3.0)
    ]
    assert all(more > less for more, less in itertools.pairwise(spent))
    assert spent[-1] == pytest.approx(optimal_cost(costs), abs=0.1)


@pytest.mark.req("OT-01")
@given(
    sizes=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 14)), max_size=12),
    cost=COSTS,
    epsilon=MILD_EPSILONS,
    iters=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
@example([(3, 200), (200, 200), (200, 199), (197, 200), (5, 5), (5, 6)], "l2", 5.0, 30, 0)
def test_pairs_of_any_sizes_together_agree_with_the_textbook_one_by_one(
    sizes: list[tuple[int, int]], cost: TransportCost, epsilon: float, iters: int, seed: int
) -> None:
    """Within the textbook's reach, which is no point further than 40 epsilons from all others."""
    rng = np.random.default_rng(seed)
    side = min(999.0, 20 * epsilon)
    pairs = [(rng.uniform(0, side, (n, 2)), rng.uniform(0, side, (m, 2))) for n, m in sizes]
    together = transport_shares(pairs, cost, epsilon, iters)
    assert len(together) == len(pairs)
    for shares, (pred, truth) in zip(together, pairs, strict=True):
        costs = distances(pred.tolist(), truth.tolist(), cost)
        expected = textbook_projection(pred, truth, costs, epsilon, iters)
        np.testing.assert_allclose(shares @ truth, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.req("OT-01")
@given(pairs=st.lists(st.tuples(SHAPES, SHAPES), max_size=8), cost=COSTS, epsilon=MILD_EPSILONS)
def test_shapes_together_are_taught_what_each_is_taught_alone(
    pairs: list[tuple[Shape, Shape]], cost: TransportCost, epsilon: float
) -> None:
    together = projected_bins(pairs, cost, epsilon, 10)
    assert len(together) == len(pairs)
    for bins, (predicted, truth) in zip(together, pairs, strict=True):
        assert bins == pytest.approx(bins_of(predicted, truth, cost, epsilon, 10), abs=1e-9)


# ---- what must not matter ------------------------------------------------------------


@pytest.mark.req("OT-01")
@given(pred=BINS, truth=BINS, cost=COSTS, epsilon=MILD_EPSILONS, iters=st.integers(1, 20))
def test_no_round_takes_the_marginals_further_away(
    pred: Points, truth: Points, cost: TransportCost, epsilon: float, iters: int
) -> None:
    before, after = (
        np.abs(shares_of(pred, truth, cost, epsilon, n).mean(axis=0) - 1 / len(truth)).sum()
        for n in (iters, iters + 1)
    )
    assert after <= before + 1e-9


@pytest.mark.req("OT-01")
@given(
    pred=BINS,
    truth=BINS,
    cost=COSTS,
    epsilon=MILD_EPSILONS,
    iters=st.integers(1, 10),
    data=st.data(),
)
def test_the_order_of_the_points_changes_nothing(
    pred: Points,
    truth: Points,
    cost: TransportCost,
    epsilon: float,
    iters: int,
    data: st.DataObject,
) -> None:
    order = data.draw(st.permutations(range(len(pred))))
    other_truth = data.draw(st.permutations(truth))
    straight = sinkhorn_barycentric(pred, truth, cost, epsilon, iters)
    turned = sinkhorn_barycentric([pred[i] for i in order], other_truth, cost, epsilon, iters)
    np.testing.assert_allclose(turned, straight[order], atol=1e-6)


@pytest.mark.req("OT-01")
@given(
    pred=BINS,
    truth=BINS,
    cost=COSTS,
    epsilon=EPSILONS,
    iters=st.integers(1, 10),
    move=st.tuples(st.integers(-2000, 2000), st.integers(-2000, 2000)),
)
def test_moving_both_sets_moves_the_projection(
    pred: Points,
    truth: Points,
    cost: TransportCost,
    epsilon: float,
    iters: int,
    move: tuple[int, int],
) -> None:
    here = sinkhorn_barycentric(pred, truth, cost, epsilon, iters)
    there = sinkhorn_barycentric(np.add(pred, move), np.add(truth, move), cost, epsilon, iters)
    np.testing.assert_allclose(there, here + move, atol=1e-9)


@pytest.mark.req("OT-01")
@given(point=BINS, truth=BINS, cost=COSTS, epsilon=EPSILONS, iters=st.integers(1, 10))
def test_points_in_one_place_go_to_one_place(
    point: Points, truth: Points, cost: TransportCost, epsilon: float, iters: int
) -> None:
    found = sinkhorn_barycentric([*point, point[0]], truth, cost, epsilon, iters)
    assert found[0].tolist() == found[-1].tolist()
    shares = shares_of(point, [*truth, truth[0]], cost, epsilon, iters)
    assert shares[:, 0].tolist() == shares[:, -1].tolist()


@pytest.mark.req("OT-01")
@pytest.mark.parametrize("epsilon", [1e-300, 1e-3, 1.0, 1e300])
def test_any_number_of_rounds_stays_finite(epsilon: float) -> None:
    found = sinkhorn_barycentric([*SQUARE, SQUARE[0]], TRIANGLE, "l2", epsilon, 10_000)
    assert np.isfinite(found).all()


@pytest.mark.req("OT-01")
def test_points_of_lower_precision_are_projected_in_float64() -> None:
    pred, truth = (np.array(points, dtype=np.float32) / 7 for points in (SQUARE, TRIANGLE))
    found = sinkhorn_barycentric(pred, truth, "l2", 5.0, 5)
    assert found.dtype == np.float64
    wide = sinkhorn_barycentric(pred.astype(np.float64), truth.astype(np.float64), "l2", 5.0, 5)
    assert found.tolist() == wide.tolist()


GIVE_POINTS = "Give (N, 2) with N >= 1"
NOT_FINITE = "a coordinate is NaN or infinite"
USE_FINITE = "Use a finite number above 0"


@pytest.mark.parametrize(
    ("wrong", "where", "found", "do"),
    [
        ({"pred_points": []}, "pred_points", "an array of shape (0,)", GIVE_POINTS),
        ({"pred_points": np.zeros((0, 2))}, "pred_points", "an array of shape (0, 2)", GIVE_POINTS),
        ({"gt_points": [[1.0, 2.0, 3.0]]}, "gt_points", "an array of shape (1, 3)", GIVE_POINTS),
        ({"gt_points": [1.0, 2.0]}, "gt_points", "an array of shape (2,)", GIVE_POINTS),
        (
            {"pred_points": [[float("nan"), 1.0]]},
            "pred_points",
            NOT_FINITE,
            "Give finite coordinates",
        ),
        ({"gt_points": [[1.0, float("inf")]]}, "gt_points", NOT_FINITE, "Give finite coordinates"),
        ({"cost": "l3"}, "cost", "'l3' is not known", "Use 'l1' or 'l2'"),
        ({"epsilon": 0.0}, "epsilon", "0.0 is not accepted", USE_FINITE),
        ({"epsilon": float("nan")}, "epsilon", "nan is not accepted", USE_FINITE),
        ({"epsilon": float("inf")}, "epsilon", "inf is not accepted", USE_FINITE),
        ({"iters": 0}, "iters", "0 is not accepted", "Use 1 or more"),
    ],
)
def test_what_cannot_be_transported_is_refused_by_name(
    wrong: dict[str, Any], where: str, found: str, do: str
) -> None:
    given = {
        "pred_points": SQUARE,
        "gt_points": TRIANGLE,
        "cost": "l1",
        "epsilon": 1.0,
        "iters": 5,
    }
    with pytest.raises(ContractError) as caught:
        sinkhorn_barycentric(**{**given, **wrong})
    error = caught.value
    assert (error.where, error.found, error.do) == (where, found, do)


# ---- shapes to bins ------------------------------------------------------------------


@pytest.mark.req("OT-01")
def test_a_polygon_goes_to_the_corners_of_its_box() -> None:
    box = Shape("bbox_2d", (100, 200, 300, 400))
    tilted = Shape("poly", (290, 210, 310, 390, 110, 410, 90, 190))
    found = bins_of(tilted, box, "l2", 1.0, 100)
    assert found == pytest.approx((300, 200, 300, 400, 100, 400, 100, 200))


@pytest.mark.req("OT-01")
def test_each_side_of_a_box_goes_to_the_mean_of_the_two_corners_on_it() -> None:
    box = Shape("bbox_2d", (100, 200, 300, 400))
    trapezoid = Shape("poly", (320, 390, 70, 420, 110, 190, 290, 230))
    found = bins_of(box, trapezoid, "l2", 1.0, 100)
    assert found == pytest.approx(
        ((110 + 70) / 2, (190 + 230) / 2, (290 + 320) / 2, (420 + 390) / 2)
    )


# ---- what is right stays (RES-19) ----------------------------------------------------

DEFAULTS = MatchingConfig()
SIDES = st.integers(8, 500)


def taught(predicted: Shape, truth: Shape, cost: TransportCost = DEFAULTS.ot_cost) -> FloatArray:
    """By the settings that are shipped."""
    return np.array(bins_of(predicted, truth, cost, DEFAULTS.ot_epsilon, DEFAULTS.ot_iters))


@st.composite
def polygons(draw: st.DrawFn) -> Shape:
    """4 to 32 vertices anywhere in a box of 8 to 500 bins a side, which they fill."""
    width, height = draw(SIDES), draw(SIDES)
    left, top = draw(st.integers(0, 999 - width)), draw(st.integers(0, 999 - height))
    inside = st.tuples(st.integers(0, width), st.integers(0, height))
    points = [(0, 0), (width, height), *draw(st.lists(inside, min_size=2, max_size=30))]
    ordered = draw(st.permutations(points))
    return Shape("poly", tuple(c for x, y in ordered for c in (left + x, top + y)))


@st.composite
def outlines(draw: st.DrawFn) -> Shape:
    """The same around an ellipse: regular, or with dents."""
    width, height, n = draw(SIDES), draw(SIDES), draw(st.integers(4, 32))
    dents = draw(st.one_of(st.just([1.0] * n), st.lists(st.floats(0.4, 1), min_size=n, max_size=n)))
    angles = 2 * np.pi * np.arange(n) / n
    xs = 500 + np.multiply(dents, np.cos(angles)) * width / 2
    ys = 500 + np.multiply(dents, np.sin(angles)) * height / 2
    return Shape("poly", tuple(np.rint(np.stack([xs, ys], axis=1)).astype(int).ravel().tolist()))


@pytest.mark.req("RES-19", "OT-01")
@given(
    shape=st.one_of(polygons(), outlines()),
    cost=COSTS,
    first=st.integers(0, 31),
    backwards=st.booleans(),
)
def test_a_right_polygon_is_taught_as_it_is_wherever_its_truth_begins(
    shape: Shape, cost: TransportCost, first: int, backwards: bool
) -> None:
    points = np.reshape(shape.coords, (-1, 2))
    turned = np.roll(points[::-1] if backwards else points, first, axis=0)
    truth = Shape("poly", tuple(turned.ravel().tolist()))
    assert np.abs(taught(shape, truth, cost) - shape.coords).max() <= 1


@pytest.mark.req("RES-19", "OT-01")
@given(x=st.integers(0, 499), y=st.integers(0, 499), width=SIDES, height=SIDES, cost=COSTS)
def test_a_box_on_its_own_outline_is_taught_as_it_is(
    x: int, y: int, width: int, height: int, cost: TransportCost
) -> None:
    """In a pair with a polygon of the same four corners, on either side."""
    box = Shape("bbox_2d", (x, y, x + width, y + height))
    outline = corners(box)
    assert np.abs(taught(box, outline, cost) - box.coords).max() <= 1
    assert np.abs(taught(outline, box, cost) - outline.coords).max() <= 1


@pytest.mark.req("RES-19", "OT-01")
@pytest.mark.parametrize("vertices", [4, 8, 16, 32])
@pytest.mark.parametrize("side", [8, 20, 150, 500])
@pytest.mark.parametrize("off", ["moved", "smaller", "larger"])
def test_what_is_near_is_taught_nearer(off: str, side: int, vertices: int) -> None:
    """The prediction overlaps its truth by less than 0.8, what is taught of it by more."""
    angles = 2 * np.pi * (np.arange(vertices) + 0.5) / vertices
    ring = np.stack([np.cos(angles), np.sin(angles)], axis=1) * side / 2
    factor, move = {"moved": (1.0, 0.15), "smaller": (0.8, 0.0), "larger": (1.3, 0.0)}[off]
    truth, said = (
        Shape("poly", tuple(np.rint(points + 450).astype(int).ravel().tolist()))
        for points in (ring, ring * factor + [move * side, 0])
    )
    learnt = Shape("poly", tuple(np.rint(taught(said, truth)).astype(int).tolist()))
    before, after = (mask_iou(shape, truth, 1000) for shape in (said, learnt))
    assert before < 0.8 < after


AT_THE_EDGE = Shape("poly", (999, 137, 999, 582, 999, 867))


@pytest.mark.req("OT-01")
@given(predicted=SHAPES, truth=SHAPES, cost=COSTS, epsilon=EPSILONS, iters=st.integers(1, 10))
@example(Shape("poly", (410, 391, 532, 391, 532, 630, 410, 630)), AT_THE_EDGE, "l2", 10.0, 30)
def test_each_coordinate_has_a_bin_within_those_of_the_ground_truth(
    predicted: Shape, truth: Shape, cost: TransportCost, epsilon: float, iters: int
) -> None:
    bins = np.array(bins_of(predicted, truth, cost, epsilon, iters))
    assert bins.shape == (len(predicted.coords),)
    for axis in (0, 1):
        along = truth.coords[axis::2]
        assert (bins[axis::2] >= min(along) - 1e-9).all()
        assert (bins[axis::2] <= min(max(along) + 1e-9, 999)).all()


@pytest.mark.req("OT-01")
@given(predicted=SHAPES, truth=SHAPES, cost=COSTS, epsilon=MILD_EPSILONS, iters=st.integers(1, 10))
def test_a_box_is_its_four_corners(
    predicted: Shape, truth: Shape, cost: TransportCost, epsilon: float, iters: int
) -> None:
    """The same polygon, written out, goes to the same places."""
    bins = bins_of(predicted, corners(truth), cost, epsilon, iters)
    assert bins_of(predicted, truth, cost, epsilon, iters) == bins
    if predicted.kind == "bbox_2d":
        x1, y1, x2, y1_, x2_, y2, x1_, y2_ = bins_of(
            corners(predicted), truth, cost, epsilon, iters
        )
        means = ((x1 + x1_) / 2, (y1 + y1_) / 2, (x2 + x2_) / 2, (y2 + y2_) / 2)
        assert bins == pytest.approx(means, abs=1e-9)


def corners(shape: Shape) -> Shape:
    """A box as a polygon, a polygon as it is."""
    if shape.kind == "poly":
        return shape
    x1, y1, x2, y2 = shape.coords
    return Shape("poly", (x1, y1, x2, y1, x2, y2, x1, y2))
