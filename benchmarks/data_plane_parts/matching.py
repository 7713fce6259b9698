"""`match_objects` against drawing every candidate pair with pycocotools.

    pair by pair      both shapes of every candidate pair are drawn, then their IoU taken
    each shape once   the milder peer: every shape is drawn once, then one IoU call for each
                      prediction with all of its candidates

Both peers are given our candidates and our assignment, so that the ratio is about the masks.
Both sides get the same scenes, and must find the same mask IoU (to 1e-9) and the same pairs.
Times are of the processor, not of the clock.

A crowd is objects of several sizes around a few places, as people, cars or goods on a shelf are;
scattered objects may be anywhere. Every ninth prediction is mirrored at the diagonal, so that
some objects are missed and as many made up.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pycocotools.mask as coco_mask

from benchmarks.results import Result, median_of
from learner.config.rollout_matching import MatchingConfig
from learner.stages.matching import Shapes, assign, candidates, match_objects
from learner.types import Shape

SCENES = 5
CROWDS = 6

Array = npt.NDArray[np.float64]
Pairs = list[tuple[int, int]]
Scene = tuple[list[Shape], list[Shape]]
Match = Callable[[Sequence[Shape], Sequence[Shape], MatchingConfig], tuple[Array, Pairs]]


class UnequalMatches(Exception):
    """The peer found other pairs, or another mask IoU."""


def measure(rounds: int) -> list[Result]:
    """Each round draws scenes of its own."""
    every, few = MatchingConfig(candidate_top_k=100), MatchingConfig(candidate_top_k=10)
    return [
        *_ratios("boxes in crowds, all pairs", rounds, every, crowded=True),
        *_ratios("boxes in crowds, 10 candidates", rounds, few, crowded=True),
        *_ratios("scattered boxes, all pairs", rounds, every, crowded=False),
        *_ratios("scattered boxes, 10 candidates", rounds, few, crowded=False),
        _seconds("boxes", rounds, few, corners=()),
        _seconds("polygons of 12 points", rounds, few, corners=(12,)),
    ]


# ---- scenes --------------------------------------------------------------------------


def draw_scene(n: int, seed: int, crowded: bool, corners: Sequence[int]) -> Scene:
    """n predictions, shuffled, and n ground truths: boxes, or polygons of any of these corners."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(0, 999, (n, 2))
    if crowded:
        places = rng.uniform(150, 850, (CROWDS, 2))
        centres = rng.normal(places[rng.integers(0, CROWDS, n)], 60)
    half = rng.lognormal(3.2, 0.5, (n, 2))
    truths = np.concatenate([centres - half, centres + half], axis=1)
    noise = np.concatenate([half, half], axis=1) / 8
    predicted = rng.permutation(rng.normal(truths, noise))
    predicted[::9] = predicted[::9][:, [1, 0, 3, 2]]
    drawn = [_shape(box, corners, rng) for box in np.concatenate([predicted, truths])]
    return drawn[:n], drawn[n:]


def _shape(box: Array, corners: Sequence[int], rng: np.random.Generator) -> Shape:
    low, high = np.minimum(box[:2], box[2:]), np.maximum(box[:2], box[2:])
    if not corners:
        return Shape("bbox_2d", _bins(np.concatenate([low, high])))
    angles = np.sort(rng.uniform(0, 2 * np.pi, rng.choice(corners)))
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return Shape("poly", _bins(((low + high) / 2 + directions * (high - low) / 2).ravel()))


def _bins(values: Array) -> tuple[int, ...]:
    return tuple(np.clip(np.rint(values), 0, 999).astype(int).tolist())


# ---- the peers -----------------------------------------------------------------------


def _pair_by_pair(
    predicted: Sequence[Shape], truths: Sequence[Shape], config: MatchingConfig
) -> tuple[Array, Pairs]:
    side = config.maskiou_resolution
    near = candidates(Shapes.of(predicted).boxes, Shapes.of(truths).boxes, config.candidate_top_k)
    iou = np.full(near.shape, np.nan)
    for i, j in np.argwhere(near).tolist():
        masks = _draw(predicted[i], side), _draw(truths[j], side)
        iou[i, j] = coco_mask.iou([masks[0]], [masks[1]], [0])[0, 0]
    return iou, _pairs(iou, config)


def _each_shape_once(
    predicted: Sequence[Shape], truths: Sequence[Shape], config: MatchingConfig
) -> tuple[Array, Pairs]:
    side = config.maskiou_resolution
    near = candidates(Shapes.of(predicted).boxes, Shapes.of(truths).boxes, config.candidate_top_k)
    iou = np.full(near.shape, np.nan)
    masks = [_draw(truth, side) for truth in truths]
    for i, shape in enumerate(predicted):
        js = np.flatnonzero(near[i])
        iou[i, js] = coco_mask.iou([_draw(shape, side)], [masks[j] for j in js], [0] * len(js))
    return iou, _pairs(iou, config)


def _draw(shape: Shape, side: int) -> Any:
    outline = shape.coords
    if shape.kind == "bbox_2d":
        x1, y1, x2, y2 = outline
        outline = (x1, y1, x2, y1, x2, y2, x1, y2)
    scale = (side - 1) / 999
    return coco_mask.frPyObjects([[value * scale for value in outline]], side, side)[0]


def _pairs(iou: Array, config: MatchingConfig) -> Pairs:
    cost = np.where(iou >= config.maskiou_gate, 1 - iou, np.inf)
    return assign(cost, config.fp_cost, config.fn_cost)


# ---- what is measured ----------------------------------------------------------------


def _ours(
    predicted: Sequence[Shape], truths: Sequence[Shape], config: MatchingConfig
) -> tuple[Array, Pairs]:
    result = match_objects(predicted, truths, config)
    return result.mask_iou, result.pairs


def _ratios(name: str, rounds: int, config: MatchingConfig, crowded: bool) -> list[Result]:
    """Over each of the peers, matching 100 with 100."""
    sides: tuple[Match, ...] = (_ours, _pair_by_pair, _each_shape_once)
    times: list[list[float]] = []
    for n in range(rounds):
        scenes = [draw_scene(100, n * SCENES + k, crowded, corners=()) for k in range(SCENES)]
        runs = [_timed(side, scenes, config) for side in sides]
        _check_equal(runs)
        times.append([seconds for seconds, _ in runs])
    ours, *peers = (statistics.median(side) / SCENES * 1e3 for side in zip(*times, strict=True))
    return [
        median_of(
            f"matching 100 x 100 {name}, over {peer}",
            [row[column] / row[0] for row in times],
            goal,
            at_least=True,
            detail=f"{ours:.2f} and {peers[column - 1]:.2f} ms",
        )
        for column, peer, goal in ((1, "pair by pair", 30), (2, "each shape once", 1))
    ]


def _seconds(name: str, rounds: int, config: MatchingConfig, corners: Sequence[int]) -> Result:
    """Matching 1,000 with 1,000 in a crowd."""
    values, pairs = [], []
    for n in range(rounds):
        seconds, found = _timed(_ours, [draw_scene(1000, n, True, corners)], config)
        values.append(seconds)
        pairs.append(len(found[0][1]))
    detail = f"{statistics.median(pairs):g} pairs"
    return median_of(
        f"matching 1,000 x 1,000 {name} in crowds, 10 candidates",
        values,
        1,
        at_least=False,
        unit=" s",
        detail=detail,
    )


def _timed(
    match: Match, scenes: Sequence[Scene], config: MatchingConfig
) -> tuple[float, list[tuple[Array, Pairs]]]:
    start = time.process_time()
    found = [match(predicted, truths, config) for predicted, truths in scenes]
    return time.process_time() - start, found


def _check_equal(runs: Sequence[tuple[float, list[tuple[Array, Pairs]]]]) -> None:
    (_, ours), *peers = runs
    for _, theirs in peers:
        for (iou, pairs), (peer_iou, peer_pairs) in zip(ours, theirs, strict=True):
            same_iou = np.allclose(iou, peer_iou, rtol=0, atol=1e-9, equal_nan=True)
            if not same_iou or pairs != peer_pairs:
                raise UnequalMatches
