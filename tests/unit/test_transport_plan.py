"""Barycentric projection of the Sinkhorn plan (section 9 of the contract)."""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.transport_plan import TransportCost, sinkhorn_barycentric
from shared_contracts.errors import ContractError

FloatArray = npt.NDArray[np.float64]

SQUARE = [[100.0, 100.0], [300.0, 100.0], [300.0, 300.0], [100.0, 300.0]]
TRIANGLE = [[100.0, 120.0], [310.0, 90.0], [220.0, 280.0]]

COSTS = st.sampled_from(["l1", "l2"])
EPSILONS = st.floats(min_value=5e-324, max_value=sys.float_info.max)
POINTS = st.lists(st.tuples(st.floats(0, 999), st.floats(0, 999)).map(list), min_size=1, max_size=6)


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


@pytest.mark.req("ARCH-02")
@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("iters", [1, 3, 200])
@pytest.mark.parametrize("epsilon", [50.0, 200.0, 5000.0])
def test_it_agrees_with_the_textbook(cost: TransportCost, iters: int, epsilon: float) -> None:
    pred, truth = np.array(SQUARE), np.array(TRIANGLE)
    offset = pred[:, None] - truth[None]
    distance = np.abs(offset).sum(axis=2) if cost == "l1" else np.hypot(*offset.transpose(2, 0, 1))
    expected = textbook_projection(pred, truth, distance, epsilon, iters)
    found = sinkhorn_barycentric(pred, truth, cost, epsilon, iters)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.req("ARCH-02")
@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("epsilon", [1e-300, 1e-6, 1.0])
def test_equal_sets_stay_where_they_are_when_epsilon_is_small(
    cost: TransportCost, epsilon: float
) -> None:
    shuffled = [SQUARE[i] for i in (2, 0, 3, 1)]
    found = sinkhorn_barycentric(SQUARE, shuffled, cost, epsilon, 50)
    np.testing.assert_allclose(found, SQUARE)


@pytest.mark.req("ARCH-02")
@pytest.mark.parametrize("epsilon", [1e12, 1e300, sys.float_info.max])
def test_every_point_goes_to_the_mean_when_epsilon_is_huge(epsilon: float) -> None:
    found = sinkhorn_barycentric(SQUARE, TRIANGLE, "l2", epsilon, 50)
    np.testing.assert_allclose(found, np.tile(np.mean(TRIANGLE, axis=0), (4, 1)), rtol=1e-6)


@pytest.mark.req("ARCH-02")
def test_the_marginals_part_points_that_share_a_nearest_neighbour() -> None:
    """Costs 0 + 201 as paired below, 200 + 92 the other way round."""
    pred = [[100.0, 0.0], [120.0, 90.0]]
    truth = [[100.0, 0.0], [300.0, 0.0]]
    found = sinkhorn_barycentric(pred, truth, "l2", 5.0, 500)
    np.testing.assert_allclose(found, truth, atol=0.5)


@pytest.mark.req("ARCH-02")
@settings(max_examples=150)
@given(pred=POINTS, truth=POINTS, cost=COSTS, epsilon=EPSILONS, iters=st.integers(1, 20))
def test_the_projection_is_finite_and_inside_the_box_of_the_ground_truth(
    pred: list[list[float]],
    truth: list[list[float]],
    cost: TransportCost,
    epsilon: float,
    iters: int,
) -> None:
    with np.errstate(invalid="raise", divide="raise"):
        found = sinkhorn_barycentric(pred, truth, cost, epsilon, iters)
    assert found.shape == (len(pred), 2)
    assert found.dtype == np.float64
    assert np.isfinite(found).all()
    assert (found >= np.min(truth, axis=0) - 1e-9).all()
    assert (found <= np.max(truth, axis=0) + 1e-9).all()


@pytest.mark.req("ARCH-02")
def test_points_of_lower_precision_are_projected_in_float64() -> None:
    narrow = np.array(SQUARE, dtype=np.float32)
    found = sinkhorn_barycentric(narrow, narrow, "l1", 1e-3, 5)
    assert found.dtype == np.float64


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"pred_points": []}, "pred_points"),
        ({"gt_points": [[1.0, 2.0, 3.0]]}, "gt_points"),
        ({"gt_points": [1.0, 2.0]}, "gt_points"),
        ({"pred_points": [[float("nan"), 1.0]]}, "pred_points"),
        ({"cost": "l3"}, "cost"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": float("inf")}, "epsilon"),
        ({"iters": 0}, "iters"),
    ],
)
def test_what_cannot_be_transported_is_refused_by_name(wrong: dict[str, Any], where: str) -> None:
    given = {
        "pred_points": SQUARE,
        "gt_points": TRIANGLE,
        "cost": "l1",
        "epsilon": 1.0,
        "iters": 5,
    }
    with pytest.raises(ContractError) as caught:
        sinkhorn_barycentric(**{**given, **wrong})
    assert caught.value.where == where
