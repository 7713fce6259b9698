"""`match_objects` against drawing both shapes of every candidate pair with pycocotools.

The peer is given our candidates and our assignment, so that the ratio is about the masks. Both
sides get the same scenes, and must find the same mask IoU (to 1e-9) and the same pairs. Times are
of the processor, not of the clock.

A crowd is objects of several sizes around a few places, as people, cars or goods on a shelf are.
Every ninth prediction is mirrored at the diagonal, so that some objects are missed and as many
made up.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pycocotools.mask as coco_mask

from benchmarks.command import Bench
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


def measure(bench: Bench) -> list[Result]:
    """Each round draws scenes of its own."""
    every, few = MatchingConfig(candidate_top_k=100), MatchingConfig(candidate_top_k=10)
    return [
        _ratio("all pairs", bench.rounds, every),
        _ratio("10 candidates", bench.rounds, few),
    ]


# ---- scenes --------------------------------------------------------------------------


def draw_scene(n: int, seed: int, corners: Sequence[int]) -> Scene:
    """n predictions, shuffled, and n ground truths: boxes, or polygons of any of these corners."""
    rng = np.random.default_rng(seed)
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


# ---- the peer ------------------------------------------------------------------------


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


def _ratio(name: str, rounds: int, config: MatchingConfig) -> Result:
    """Over the peer, matching 100 with 100."""
    times = []
    for n in range(rounds):
        scenes = [draw_scene(100, n * SCENES + k, corners=()) for k in range(SCENES)]
        (ours, found), (peers, peer_found) = (
            _timed(side, scenes, config) for side in (_ours, _pair_by_pair)
        )
        for (iou, pairs), (peer_iou, peer_pairs) in zip(found, peer_found, strict=True):
            same_iou = np.allclose(iou, peer_iou, rtol=0, atol=1e-9, equal_nan=True)
            assert same_iou, "the peer found another mask IoU"
            assert pairs == peer_pairs, "the peer found other pairs"
        times.append((ours, peers))
    ours_ms, peers_ms = (statistics.median(s) / SCENES * 1e3 for s in zip(*times, strict=True))
    return median_of(
        f"matching 100 x 100 boxes in crowds, {name}, over pair by pair",
        [peers / ours for ours, peers in times],
        30,
        at_least=True,
        detail=f"{ours_ms:.2f} and {peers_ms:.2f} ms",
    )


def _timed(
    match: Match, scenes: Sequence[Scene], config: MatchingConfig
) -> tuple[float, list[tuple[Array, Pairs]]]:
    start = time.process_time()
    found = [match(predicted, truths, config) for predicted, truths in scenes]
    return time.process_time() - start, found
