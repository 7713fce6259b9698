"""Targets of the points of a predicted shape by entropic optimal transport (OT-01).

Each point of the prediction is sent to the mean of the ground-truth points, weighted by its
row of the Sinkhorn plan between the two sets (barycentric projection; Cuturi 2013, and Peyre
and Cuturi, Computational Optimal Transport, 2019, sections 4.2 and 4.4).

Pairs of about equal sizes are computed together, as one array of (P, G, pairs). A set is filled up
to a multiple of `_SIZE_STEP` points with copies of its last point. Such a copy has a potential of
-inf, which is a marginal of 0, so it takes no part in the plan.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from learner.stages.tokens import COORD_BINS
from learner.types import Shape
from shared_contracts.errors import ContractError

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
Points = npt.NDArray[np.floating] | Sequence[Sequence[float]]
TransportCost = Literal["l1", "l2"]

# Which of x1, y1, x2, y2 are the x and the y of each corner of a box.
_BOX_CORNERS = np.array([[0, 1], [2, 1], [2, 3], [0, 3]])

# Sets are filled up to a multiple of _SIZE_STEP points. An array of several plans has at most
# _MAX_ENTRIES entries (512 KiB, the size of a cache).
_SIZE_STEP = 4
_MAX_ENTRIES = 2**16


def projected_bins(
    pairs: Sequence[tuple[Shape, Shape]], cost: TransportCost, epsilon: float, iters: int
) -> list[tuple[float, ...]]:
    """Return the target of each coordinate token of the predictions, in fractional bins.

    The points of a polygon are its vertices, those of a box its four corners. A coordinate
    of a predicted box belongs to two corners; its target is the mean of their projections,
    which gives the box whose corners are nearest to the projected ones (least squares).

    pairs: (predicted, truth). Other arguments and errors are those of `sinkhorn_barycentric`.
    Returns for each pair one target in [0, 999] per coordinate of `predicted`, in its order.
    """
    points = [(_shape_points(predicted), _shape_points(truth)) for predicted, truth in pairs]
    shares = transport_shares(points, cost, epsilon, iters)
    found = []
    for (predicted, _), (_, truth_points), share in zip(pairs, points, shares, strict=True):
        bins = (share @ truth_points).ravel()
        if predicted.kind == "bbox_2d":
            bins = np.bincount(_BOX_CORNERS.ravel(), weights=bins) / 2
        found.append(tuple(bins.clip(max=COORD_BINS - 1).tolist()))  # 999 may be rounded up
    return found


def _shape_points(shape: Shape) -> FloatArray:
    """Return x and y of each point of the shape, (N, 2)."""
    coords = np.array(shape.coords, dtype=np.float64)
    return coords[_BOX_CORNERS] if shape.kind == "bbox_2d" else coords.reshape(-1, 2)


def sinkhorn_barycentric(
    pred_points: Points, gt_points: Points, cost: TransportCost, epsilon: float, iters: int
) -> FloatArray:
    """Return the barycentric projection (P, 2) of the predicted points, in norm1000.

        ghat_i = sum_j T_ij g_j / sum_j T_ij

    pred_points, gt_points: (P, 2) and (G, 2), x and y in norm1000.
    Raises ContractError for other shapes, no points and numbers that are not finite. Other
    arguments and errors are those of `transport_shares`.
    """
    pred, truth = _points("pred_points", pred_points), _points("gt_points", gt_points)
    (shares,) = transport_shares([(pred, truth)], cost, epsilon, iters)
    projected: FloatArray = shares @ truth
    return projected


def transport_shares(
    pairs: Sequence[tuple[FloatArray, FloatArray]], cost: TransportCost, epsilon: float, iters: int
) -> list[FloatArray]:
    """Return for each pair the shares (P, G) of the ground-truth points in each predicted point.

    The plan T after `iters` rounds of log-domain Sinkhorn with marginals 1/P and 1/G, each
    row divided by its sum. It is finite for every `epsilon`: towards 0 each point has one ground
    truth, towards infinity equal shares of all.

    pairs: points (P, 2) and (G, 2) of a prediction and of a ground truth, P and G at least 1.
    cost: `l1`, |dx| + |dy|, or `l2`, the Euclidean distance (not its square).
    epsilon: weight of the entropy, in the unit of the cost, which is norm1000. Points nearer than
        a few of it are mixed, which pulls the projection inwards; the default of the YAML, 0.5,
        leaves equal sets where they are, within a bin (RES-19).
    Raises ContractError for another cost, and `epsilon` or `iters` that are not positive.
    """
    _check_settings(cost, epsilon, iters)
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (pred, truth) in enumerate(pairs):
        groups[_filled_size(pred), _filled_size(truth)].append(index)
    found: dict[int, FloatArray] = {}
    for (rows, columns), group in groups.items():
        step = max(_MAX_ENTRIES // (rows * columns), 1)
        for first in range(0, len(group), step):
            batch = group[first : first + step]
            pred, pred_sizes = _fill([pairs[index][0] for index in batch], rows)
            truth, truth_sizes = _fill([pairs[index][1] for index in batch], columns)
            order = 1 if cost == "l1" else 2
            costs: FloatArray = np.linalg.norm(pred[:, None] - truth, ord=order, axis=3)
            plans = _sinkhorn(costs, pred_sizes, truth_sizes, epsilon, iters)
            for place, index in enumerate(batch):
                found[index] = plans[: pred_sizes[place], : truth_sizes[place], place]
    return [found[index] for index in range(len(pairs))]


def _filled_size(points: FloatArray) -> int:
    return -(-len(points) // _SIZE_STEP) * _SIZE_STEP


def _fill(sets: Sequence[FloatArray], size: int) -> tuple[FloatArray, IndexArray]:
    """Return sets of points as one array (`size`, B, 2), and the number of points of each."""
    sizes = np.array([len(points) for points in sets])
    order = np.arange(size)[:, None]
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(sets)[starts + np.minimum(order, sizes - 1)], sizes


def _sinkhorn(
    costs: FloatArray,
    pred_sizes: IndexArray,
    truth_sizes: IndexArray,
    epsilon: float,
    iters: int,
) -> FloatArray:
    """Return the plans (P, G, B), each row divided by its sum; entries of fillers have no meaning.

    costs: (P, G, B). pred_sizes, truth_sizes: (B,) points that are no fillers.
    """
    pred_fillers, truth_fillers = (
        np.where(np.arange(size)[:, None] < sizes, 0.0, -np.inf)
        for size, sizes in zip(costs.shape, (pred_sizes, truth_sizes), strict=False)
    )
    turned = costs.transpose(1, 0, 2).copy()  # a reduction is faster along the first axis
    truth_potential = truth_fillers
    for _ in range(iters):
        pred_potential = pred_fillers + _soft_min(
            turned - truth_potential[:, None], epsilon, truth_sizes
        )
        truth_potential = truth_fillers + _soft_min(
            costs - pred_potential[:, None], epsilon, pred_sizes
        )
    # The potential of a point is one factor of all its shares, so the division drops it.
    _, plans = _gibbs(turned - truth_potential[:, None], epsilon)
    shares: FloatArray = (plans / plans.sum(axis=0)).transpose(1, 0, 2)
    return shares


def _soft_min(values: FloatArray, epsilon: float, count: IndexArray) -> FloatArray:
    """Return -epsilon * log(sum(exp(-values / epsilon)) / count) along the first axis."""
    least, kernel = _gibbs(values, epsilon)
    soft: FloatArray = least - epsilon * np.log(kernel.sum(axis=0) / count)
    return soft


def _gibbs(values: FloatArray, epsilon: float) -> tuple[FloatArray, FloatArray]:
    """Return least and exp(-(values - least) / epsilon), with the minima of the first axis.

    The minimum is subtracted before the division, so the largest entry is exactly 1 for any
    epsilon; a quotient that overflows is an entry of 0.
    """
    least = values.min(axis=0)
    with np.errstate(over="ignore"):
        exponents = (least - values) / epsilon
    return least, np.exp(exponents, out=exponents)


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
