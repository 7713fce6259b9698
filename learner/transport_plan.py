"""Where the points of a predicted shape should move: entropic optimal transport (OT-01).

Each point of the prediction is sent to the mean of the ground-truth points, weighted by its
row of the Sinkhorn plan between the two sets (barycentric projection; Cuturi 2013, and Peyre
and Cuturi, Computational Optimal Transport, 2019, sections 4.2 and 4.4).

    projected_bins         two shapes           -> one target per coordinate token
    sinkhorn_barycentric   two sets of points   -> one target point per predicted point
    transport_shares       two sets of points   -> the plan, rows scaled to 1
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from learner.coords import COORD_BINS
from learner.types import Shape
from shared_contracts.errors import ContractError

FloatArray = npt.NDArray[np.float64]
Points = npt.NDArray[np.floating] | Sequence[Sequence[float]]
TransportCost = Literal["l1", "l2"]

# Which of x1, y1, x2, y2 are the x and the y of each corner of a box.
_BOX_CORNERS = np.array([[0, 1], [2, 1], [2, 3], [0, 3]])


def projected_bins(
    predicted: Shape, truth: Shape, cost: TransportCost, epsilon: float, iters: int
) -> tuple[float, ...]:
    """Where each coordinate token of a prediction should be, in bins, fractions included.

    The points of a polygon are its vertices, those of a box its four corners. A coordinate
    of a predicted box stands in two corners; its target is the mean of their projections,
    which gives the box whose corners are nearest to the projected ones (least squares).

    Returns one target in [0, 999] per coordinate of `predicted`, in its order. Raises as
    `sinkhorn_barycentric`, whose arguments the others are.
    """
    slots = _point_slots(predicted)
    projected = sinkhorn_barycentric(
        np.take(predicted.coords, slots),
        np.take(truth.coords, _point_slots(truth)),
        cost,
        epsilon,
        iters,
    )
    sums = np.bincount(slots.ravel(), weights=projected.ravel())
    bins = sums / np.bincount(slots.ravel())
    return tuple(bins.clip(max=COORD_BINS - 1).tolist())  # 999 may be rounded up


def _point_slots(shape: Shape) -> npt.NDArray[np.intp]:
    """(N, 2) indices into the flat coordinates: x and y of each point of the shape."""
    if shape.kind == "bbox_2d":
        return _BOX_CORNERS
    return np.arange(len(shape.coords)).reshape(-1, 2)


def sinkhorn_barycentric(
    pred_points: Points, gt_points: Points, cost: TransportCost, epsilon: float, iters: int
) -> FloatArray:
    """Barycentric projection (P, 2) of the predicted points, in norm1000.

        ghat_i = sum_j T_ij g_j / sum_j T_ij

    Arguments and errors are those of `transport_shares`.
    """
    shares = transport_shares(pred_points, gt_points, cost, epsilon, iters)
    projected: FloatArray = shares @ np.asarray(gt_points)
    return projected


def transport_shares(
    pred_points: Points, gt_points: Points, cost: TransportCost, epsilon: float, iters: int
) -> FloatArray:
    """Which share (P, G) of each predicted point goes to which ground-truth point.

    The plan T after `iters` rounds of log-domain Sinkhorn with marginals 1/P and 1/G, each
    row divided by its sum. Finite for every `epsilon`: towards 0 a point goes to the ground
    truth that suits it best, towards infinity to all of them alike.

    pred_points, gt_points: (P, 2) and (G, 2), x and y in norm1000.
    cost: `l1`, |dx| + |dy|, or `l2`, the Euclidean distance (not its square).
    epsilon: weight of the entropy, in the unit of the cost, which is norm1000.
    Raises ContractError for other shapes, no points, numbers that are not finite, another
    cost, and `epsilon` or `iters` that are not positive.
    """
    pred, truth = _points("pred_points", pred_points), _points("gt_points", gt_points)
    _check_settings(cost, epsilon, iters)
    costs = _cost_matrix(pred, truth, cost)
    truth_potential = np.zeros(len(truth))
    for _ in range(iters):
        pred_potential = _soft_min(costs - truth_potential, epsilon, axis=1)
        truth_potential = _soft_min(costs - pred_potential[:, None], epsilon, axis=0)
    # The potential of a row is one factor of all its entries, so the division drops it.
    _, plan = _gibbs(costs - truth_potential, epsilon, axis=1)
    shares: FloatArray = plan / plan.sum(axis=1, keepdims=True)
    return shares


def _cost_matrix(pred: FloatArray, truth: FloatArray, cost: TransportCost) -> FloatArray:
    """(P, G) distances."""
    order = 1 if cost == "l1" else 2
    costs: FloatArray = np.linalg.norm(pred[:, None] - truth[None], ord=order, axis=2)
    return costs


def _soft_min(values: FloatArray, epsilon: float, axis: int) -> FloatArray:
    """-epsilon * log(mean(exp(-values / epsilon))) along `axis`."""
    least, kernel = _gibbs(values, epsilon, axis)
    soft: FloatArray = least.squeeze(axis) - epsilon * np.log(kernel.mean(axis=axis))
    return soft


def _gibbs(values: FloatArray, epsilon: float, axis: int) -> tuple[FloatArray, FloatArray]:
    """(least, exp(-(values - least) / epsilon)), `least` being the minimum along `axis`.

    The minimum goes before the division, so the largest entry is exactly 1 for any
    epsilon; a quotient that overflows is an entry of 0.
    """
    least = values.min(axis=axis, keepdims=True)
    with np.errstate(over="ignore"):
        return least, np.exp((least - values) / epsilon)


def _points(name: str, points: Points) -> FloatArray:
    array = np.asarray(points, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] != 2 or len(array) == 0:
        raise ContractError(name, f"an array of shape {array.shape}", "Give (N, 2) with N >= 1")
    if not np.isfinite(array).all():
        raise ContractError(name, "a coordinate is NaN or infinite", "Give finite coordinates")
    return array


def _check_settings(cost: TransportCost, epsilon: float, iters: int) -> None:
    if cost not in ("l1", "l2"):
        raise ContractError("cost", f"'{cost}' is not known", "Use 'l1' or 'l2'")
    if not 0 < epsilon < np.inf:
        raise ContractError("epsilon", f"{epsilon} is not accepted", "Use a finite number above 0")
    if iters < 1:
        raise ContractError("iters", f"{iters} is not accepted", "Use 1 or more")
