"""The cheapest assignment in which any object may stay alone (MATCH-02)."""

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment


def assign(cost: npt.NDArray[np.float64], fp_cost: float, fn_cost: float) -> list[tuple[int, int]]:
    """Pairs (i, j), in order of i, of the cheapest assignment.

    cost: (P, G) of pairing prediction i with ground truth j, in [0, 1], infinite where they
        must not be paired.
    fp_cost, fn_cost: of a prediction and of a ground truth that stay alone.

    The Hungarian matrix is made square with P + G dummies: a prediction on a dummy is a false
    positive, a ground truth on a dummy a false negative, two dummies cost nothing. Of several
    cheapest assignments it is the solver's, the same every time.
    """
    n_predicted, n_truth = cost.shape
    size = n_predicted + n_truth
    # From here on a price only says: pair as many as possible. A greater one changes nothing
    # but how many digits of the costs it drowns.
    fp_cost, fn_cost = min(fp_cost, size), min(fn_cost, size)
    square = np.zeros((size, size))
    square[:n_predicted, :n_truth] = cost
    square[:n_predicted, n_truth:] = fp_cost
    square[n_predicted:, :n_truth] = fn_cost
    _, columns = linear_sum_assignment(square)
    chosen = columns[:n_predicted].tolist()
    return [(i, j) for i, j in enumerate(chosen) if j < n_truth]
