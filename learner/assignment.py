"""The cheapest assignment in which any object may stay alone (MATCH-02)."""

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment


def assign(cost: npt.NDArray[np.float64], fp_cost: float, fn_cost: float) -> list[tuple[int, int]]:
    """Pairs (i, j), in order of i, of the cheapest assignment.

    cost: (P, G) of pairing prediction i with ground truth j, in [0, 1], infinite where they
        must not be paired.
    fp_cost, fn_cost: of a prediction and of a ground truth that stay alone.

    The Hungarian matrix is square, with P + G dummies: a prediction on a dummy is a false
    positive, a ground truth on a dummy a false negative, two dummies cost nothing.

                    truths     dummies                  truths          dummies
        predictions  cost      fp_cost    predictions   cost - fn_cost  fp_cost
        dummies      fn_cost   0

    Its lower half says: fn_cost for every truth that is left over. To give each prediction that
    takes a truth fn_cost back says the same, so that the solver is spared the dummies' rows:
    every assignment costs G * fn_cost less, and the cheapest is the cheapest. Of several it is
    the solver's, the same every time.
    """
    n_predicted, n_truth = cost.shape
    # From P + G on a price only says: pair as many as possible. A greater one changes nothing
    # but how many digits of the costs it drowns.
    highest = n_predicted + n_truth
    alone = np.full((n_predicted, n_predicted), min(fp_cost, highest))
    matrix = np.concatenate([cost - min(fn_cost, highest), alone], axis=1)
    _, columns = linear_sum_assignment(matrix)
    return [(i, j) for i, j in enumerate(columns.tolist()) if j < n_truth]
