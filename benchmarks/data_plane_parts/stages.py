"""Parse, match and target of 256 answers of 100 objects, and two peers of what is in it.

    one pair at a time   the plan of each matched pair of an answer in turn, written as the formula
                         is; the same bins, to 1e-9
    a scan of its own    a finished target is scanned for its parts, then parsed; the same result

Descriptions are those of the part `parser`, shapes the crowds of the part `matching`. Times are of
the processor, not of the clock; all targets of a round are kept, as a step keeps them.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from benchmarks.data_plane_parts.matching import draw_scene
from benchmarks.data_plane_parts.parser import DESCRIPTIONS, qwen_tokenizer
from benchmarks.results import Result, median_of
from learner.config.rollout_matching import MatchingConfig
from learner.stages.formats import ReadBack
from learner.stages.formats.coord_json import COORD_JSON, serialize_objects
from learner.stages.formats.json_scanner import Scanner
from learner.stages.matching import match_objects
from learner.stages.targets import assess, with_target
from learner.stages.tokens import IM_END, TokenText, token_table
from learner.stages.transport_plan import projected_bins
from learner.types import AssessedRollout, GroundTruthObject, RolloutOutput, Sample, Shape

ANSWERS = 256
OBJECTS = 100
POLYGONS = range(8, 13)
TRIES = 3
COMPARED = 16  # answers of each round that the peers get
CONFIG = MatchingConfig()

FloatArray = npt.NDArray[np.float64]
Item = TypeVar("Item")
Found = TypeVar("Found")
Answer = tuple[Sample, RolloutOutput]
Pairs = list[tuple[Shape, Shape]]


class UnequalTargets(Exception):
    """A peer found other bins, or read another target back; or an answer has no target."""


def measure(rounds: int) -> list[Result]:
    """Each round draws answers of its own."""
    tokenizer = qwen_tokenizer()
    boxes, polygons = (_rounds(rounds, tokenizer, corners) for corners in ((), POLYGONS))
    name = f"parse, match and target of {ANSWERS} answers of {OBJECTS}"
    return [
        _seconds(f"{name} boxes", [seconds for seconds, _ in boxes], 3),
        _seconds(f"{name} polygons of 8 to 12 points", [seconds for seconds, _ in polygons], 6),
        _plans([found for _, found in polygons]),
        _read_backs("boxes", [found for _, found in boxes], tokenizer),
        _read_backs("polygons", [found for _, found in polygons], tokenizer),
    ]


def _rounds(
    rounds: int, tokenizer: PreTrainedTokenizerFast, corners: Sequence[int]
) -> list[tuple[float, list[AssessedRollout]]]:
    """Seconds of the stages, and the first answers, of each round."""
    _run(_answers(tokenizer, 8, rounds, corners), tokenizer)
    found = []
    for round_ in range(rounds):
        answers = _answers(tokenizer, ANSWERS, round_, corners)
        start = time.process_time()
        assessed = _run(answers, tokenizer)
        seconds = time.process_time() - start
        if any(each.target is None for each in assessed):
            raise UnequalTargets("an answer has no target")
        found.append((seconds, assessed[:COMPARED]))
    return found


def _run(answers: Sequence[Answer], tokenizer: PreTrainedTokenizerFast) -> list[AssessedRollout]:
    match = partial(match_objects, config=CONFIG)
    return [
        with_target(
            assess(sample, rollout, tokenizer, match, allow_poly=True),
            tokenizer,
            "desc_first",
            CONFIG,
        )
        for sample, rollout in answers
    ]


def _answers(
    tokenizer: PreTrainedTokenizerFast, count: int, round_: int, corners: Sequence[int]
) -> list[Answer]:
    """Answers of `OBJECTS` objects each, and as many ground truths."""
    rng = random.Random(round_)
    end = tokenizer.encode(IM_END)
    answers = []
    for n in range(count):
        predicted, truths = (
            [GroundTruthObject(rng.choice(DESCRIPTIONS), shape) for shape in shapes]
            for shapes in draw_scene(OBJECTS, round_ * ANSWERS + n, True, corners)
        )
        ids = tokenizer.encode(serialize_objects(predicted, "desc_first")) + end
        rollout = RolloutOutput([], ids, "", "stop", False, (0, 0), None)
        answers.append((Sample(f"bench:{n}", (), 999, 999, tuple(truths)), rollout))
    return answers


def _seconds(name: str, values: list[float], goal: float) -> Result:
    return median_of(name, values, goal, at_least=False, unit=" s")


# ---- the peers -----------------------------------------------------------------------


def _plain_bins(pairs: Pairs) -> list[FloatArray]:
    """The plan of one pair of polygons after the other, by the costs of the default, `l2`."""
    return [_plain_plan(*pair, CONFIG.ot_epsilon, CONFIG.ot_iters).ravel() for pair in pairs]


def _plain_plan(predicted: Shape, truth: Shape, epsilon: float, iters: int) -> FloatArray:
    pred, gt = (np.reshape(shape.coords, (-1, 2)).astype(float) for shape in (predicted, truth))
    costs = np.linalg.norm(pred[:, None] - gt[None], axis=2)
    g = np.zeros(len(gt))
    for _ in range(iters):
        f = -epsilon * _log_mean_exp((g - costs) / epsilon, axis=1)
        g = -epsilon * _log_mean_exp((f[:, None] - costs) / epsilon, axis=0)
    logs = (g - costs) / epsilon
    plan = np.exp(logs - logs.max(axis=1, keepdims=True))
    projected: FloatArray = plan / plan.sum(axis=1, keepdims=True) @ gt
    return projected


def _log_mean_exp(values: FloatArray, axis: int) -> FloatArray:
    highest = values.max(axis=axis, keepdims=True)
    means: FloatArray = np.log(np.exp(values - highest).mean(axis=axis)) + highest.squeeze(axis)
    return means


def _scan_and_parse(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> ReadBack | None:
    """`read_back` with a scan for the parts of the target, and another one of the parser."""
    table = token_table(tokenizer)
    eos = ids.index(table.vocab.end_id)
    tokens = TokenText(table.pieces(ids[:eos], tokenizer))
    scan = Scanner(tokens.text).scan()
    if scan.close_at is None:
        return None
    spans, start = [], 0
    for entry in scan.entries:
        end = tokens.token_at(entry.end) + 1
        spans.append((start, end))
        start = end if tokens.start_of(end) == entry.end + 1 else end - 1
    closure = (tokens.token_at(scan.close_at), eos)
    return ReadBack(COORD_JSON.parse(ids, tokenizer), spans, closure)


# ---- what is measured of them --------------------------------------------------------


def _plans(rounds: Sequence[Sequence[AssessedRollout]]) -> Result:
    """Over one pair at a time."""
    times = []
    for assessed in rounds:
        answers = [_matched(each) for each in assessed]
        ours, bins = _timed(_our_bins, answers)
        theirs, plain_bins = _timed(_plain_bins, answers)
        for a, b in zip(chain(*bins), chain(*plain_bins), strict=True):
            if not np.allclose(a, b, rtol=0, atol=1e-9):
                raise UnequalTargets("other bins")
        times.append((ours, theirs))
    return _ratio("plans of the matched polygons of an answer, over one pair at a time", times, 5)


def _matched(assessed: AssessedRollout) -> Pairs:
    objects, truths = assessed.parsed.objects, assessed.sample.objects
    return [(objects[i].shape, truths[j].shape) for i, j in assessed.match.pairs]


def _our_bins(pairs: Pairs) -> list[tuple[float, ...]]:
    return projected_bins(pairs, CONFIG.ot_cost, CONFIG.ot_epsilon, CONFIG.ot_iters)


def _read_backs(
    name: str, rounds: Sequence[Sequence[AssessedRollout]], tokenizer: PreTrainedTokenizerFast
) -> Result:
    times = []
    for assessed in rounds:
        targets = [each.target.token_ids for each in assessed if each.target is not None]
        ours, found = _timed(lambda ids: COORD_JSON.read_back(ids, tokenizer), targets)
        theirs, plainly = _timed(lambda ids: _scan_and_parse(ids, tokenizer), targets)
        if found != plainly:
            raise UnequalTargets("another reading")
        times.append((ours, theirs))
    return _ratio(f"reading a target of {name} back, over a scan of its own", times, 1.2)


def _timed(work: Callable[[Item], Found], items: Sequence[Item]) -> tuple[float, list[Found]]:
    """Milliseconds of an item in the best try, and what was found."""
    best = float("inf")
    for _ in range(TRIES):
        start = time.process_time()
        found = [work(item) for item in items]
        best = min(best, time.process_time() - start)
    return best / len(items) * 1e3, found


def _ratio(name: str, times: Sequence[tuple[float, float]], goal: float) -> Result:
    ours, theirs = (statistics.median(side) for side in zip(*times, strict=True))
    return median_of(
        name,
        [peer / own for own, peer in times],
        goal,
        at_least=True,
        detail=f"{ours:.2f} and {theirs:.2f} ms an answer",
    )
