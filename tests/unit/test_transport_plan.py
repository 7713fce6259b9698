"""Barycentric projection of the Sinkhorn plan, against the textbook's scaling in float64."""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from learner.config.rollout_matching import MatchingConfig
from learner.stages.transport_plan import (
    TransportCost,
    projected_bins,
    sinkhorn_barycentric,
    transport_shares,
)
from learner.types import Shape
from tests.unit.answers import ground_truths
from tests.unit.refusals import refused

FloatArray = npt.NDArray[np.float64]
Points = list[list[float]]

SQUARE = [[100.0, 100.0], [300.0, 100.0], [300.0, 300.0], [100.0, 300.0]]
TRIANGLE = [[100.0, 120.0], [310.0, 90.0], [220.0, 280.0]]

COSTS: st.SearchStrategy[TransportCost] = st.sampled_from(["l1", "l2"])
EPSILONS = st.floats(min_value=5e-324, max_value=sys.float_info.max)
MILD_EPSILONS = st.floats(min_value=1.0, max_value=1e6)
POINTS = st.lists(st.tuples(st.floats(0, 999), st.floats(0, 999)).map(list), min_size=1, max_size=6)
SHAPES = ground_truths(allow_poly=True).map(lambda item: item.shape)


def bins_of(
    predicted: Shape, truth: Shape, cost: TransportCost, epsilon: float, iters: int
) -> tuple[float, ...]:
    """Bins that are taught to a pair in a batch of two."""
    _, bins = projected_bins([(truth, predicted), (predicted, truth)], cost, epsilon, iters)
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


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("where", "wrong", "found"),
    [
        ("pred_points", np.zeros((0, 2)), "an array of shape (0, 2)"),
        ("gt_points", [[1.0, 2.0, 3.0]], "an array of shape (1, 3)"),
        ("gt_points", [1.0, 2.0], "an array of shape (2,)"),
        ("gt_points", [[1.0, NAN]], "a coordinate is NaN or infinite"),
        ("cost", "l3", "'l3' is not known"),
        ("epsilon", 0.0, "0.0 is not accepted"),
        ("epsilon", NAN, "nan is not accepted"),
        ("epsilon", INF, "inf is not accepted"),
        ("iters", 0, "0 is not accepted"),
    ],
)
def test_invalid_arguments_are_refused_by_name(where: str, wrong: Any, found: str) -> None:
    given = {"pred_points": SQUARE, "gt_points": TRIANGLE, "cost": "l1", "epsilon": 1.0, "iters": 5}
    with refused(where, found):
        sinkhorn_barycentric(**{**given, where: wrong})


DEFAULTS = MatchingConfig()
SIDES = st.integers(8, 500)


def taught(predicted: Shape, truth: Shape, cost: TransportCost = DEFAULTS.ot_cost) -> FloatArray:
    """Bins with the default settings."""
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


@pytest.mark.req("RES-19", "OT-01")
@given(shape=polygons(), cost=COSTS, first=st.integers(0, 31), backwards=st.booleans())
def test_a_right_polygon_is_taught_as_it_is_wherever_its_truth_begins(
    shape: Shape, cost: TransportCost, first: int, backwards: bool
) -> None:
    points = np.reshape(shape.coords, (-1, 2))
    turned = np.roll(points[::-1] if backwards else points, first, axis=0)
    truth = Shape("poly", tuple(turned.ravel().tolist()))
    assert np.abs(taught(shape, truth, cost) - shape.coords).max() <= 1


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
