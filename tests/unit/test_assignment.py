"""The cheapest assignment with dummies (section 9 of the contract)."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from learner.stages.matching import assign

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


def is_one_to_one(pairs: list[tuple[int, int]]) -> bool:
    return len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)


@pytest.mark.req("MATCH-02")
@given(matrices(), PRICES, PRICES)
def test_no_assignment_is_cheaper(cost: Matrix, fp_cost: float, fn_cost: float) -> None:
    pairs = assign(cost, fp_cost, fn_cost)
    assert pairs == sorted(pairs)
    assert is_one_to_one(pairs)
    assert all(cost[i, j] < INF for i, j in pairs)
    best = cheapest(cost, fp_cost, fn_cost)
    assert total(cost, pairs, fp_cost, fn_cost) == pytest.approx(best, rel=1e-12, abs=1e-12)


@pytest.mark.req("MATCH-02")
@given(matrices(largest=6), PRICES, PRICES)
def test_the_cost_is_that_of_the_square_matrix_with_dummies(
    cost: Matrix, fp_cost: float, fn_cost: float
) -> None:
    n_predicted, n_truth = cost.shape
    square = np.zeros((n_predicted + n_truth, n_truth + n_predicted))
    square[:n_predicted, :n_truth] = cost
    square[:n_predicted, n_truth:] = fp_cost
    square[n_predicted:, :n_truth] = fn_cost
    expected = float(square[linear_sum_assignment(square)].sum())
    found = total(cost, assign(cost, fp_cost, fn_cost), fp_cost, fn_cost)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.req("MATCH-02")
@given(matrices(largest=6), PRICES, PRICES, st.integers(0, 2**32 - 1))
def test_the_order_of_the_objects_does_not_change_the_cost(
    cost: Matrix, fp_cost: float, fn_cost: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(rng.permutation(cost, axis=0), axis=1)
    expected = total(cost, assign(cost, fp_cost, fn_cost), fp_cost, fn_cost)
    found = total(shuffled, assign(shuffled, fp_cost, fn_cost), fp_cost, fn_cost)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.req("MATCH-02")
@given(matrices(largest=6), PRICES, PRICES)
def test_predictions_and_truths_may_change_sides(
    cost: Matrix, fp_cost: float, fn_cost: float
) -> None:
    here = total(cost, assign(cost, fp_cost, fn_cost), fp_cost, fn_cost)
    there = total(cost.T, assign(cost.T, fn_cost, fp_cost), fn_cost, fp_cost)
    assert there == pytest.approx(here, rel=1e-12, abs=1e-12)


@pytest.mark.req("MATCH-02")
@given(matrices(), st.sampled_from([1e15, 1e17, 1e300]), PRICES, st.booleans())
def test_a_price_beyond_all_bounds_pairs_as_many_as_it_can_and_those_well(
    cost: Matrix, huge: float, other: float, of_truths: bool
) -> None:
    pairs = assign(cost, other, huge) if of_truths else assign(cost, huge, other)
    best = cheapest(cost, 100.0, 100.0)
    assert total(cost, pairs, 100.0, 100.0) == pytest.approx(best, rel=1e-12, abs=1e-12)


@pytest.mark.req("MATCH-02")
def test_a_pair_that_costs_more_than_both_alone_is_none() -> None:
    cost = np.array([[0.5]])
    assert assign(cost, 0.25, 0.25 + 1e-12) == [(0, 0)]
    assert assign(cost, 0.25, 0.25 - 1e-12) == []


@pytest.mark.req("MATCH-02")
def test_where_nothing_is_feasible_all_stay_alone() -> None:
    for prices in ((0.0, 0.0), (1.0, 1.0), (1e300, 1e300)):
        assert assign(np.full((3, 2), INF), *prices) == []
    for size in ((0, 0), (0, 3), (3, 0)):
        assert assign(np.zeros(size), 1.0, 1.0) == []


@pytest.mark.req("MATCH-02")
def test_equal_costs_give_the_same_pairs_every_time() -> None:
    cost = np.full((6, 4), 0.5)
    first = assign(cost, 1.0, 1.0)
    assert len(first) == 4
    assert all(assign(cost.copy(), 1.0, 1.0) == first for _ in range(5))
