"""Scores of a policy by its rollouts: generate, parse, match, count (EVAL-01, -02, RES-20).

Sample -> RolloutOutput -> ParsedRollout -> MatchResult -> ScoredAnswer -> Scores

A hit is a prediction and a ground truth with the same description (in Unicode NFC) and an IoU of
at least 0.5. The IoU of two boxes is exact; that with a polygon is the IoU of both masks on a
canvas of `matching.maskiou_resolution`. An object is in at most one hit. The pairing maximizes the
number of hits, then the sum of IoUs. F1@mIoU is the mean of the F1 at `IOU_THRESHOLDS` (Rex-Omni,
arXiv 2510.12798).

With LVIS's lists (Gupta, Dollar and Girshick, CVPR 2019), a prediction is unjudged if it is no hit
at IoU 0.5 and the lists do not decide whether such an object exists. Precision and F1 ignore it.

In contrast, matching in training (`learner.stages.matching`) ignores descriptions and rasterizes
boxes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from learner.analysis.evaluation.detections import confidence
from learner.config.schema import Config
from learner.data.coco import pixel_area
from learner.distributed.waiting import waiting_for
from learner.rollout.policy import Policy
from learner.runs.metrics import Payload
from learner.runs.rollout_log import LoggedAnswer, LoggedObject, f1_of
from learner.stages.clean_prefix import repeats
from learner.stages.formats import AnswerFormat, answer_format
from learner.stages.formats.coord_json import COORD_JSON
from learner.stages.matching import (
    IOU_THRESHOLDS,
    exact_iou,
    left_open,
    most_pairs,
    same_description,
)
from learner.stages.targets import assess
from learner.stages.tokens import Tokenizer
from learner.types import (
    AssessedRollout,
    GroundTruthObject,
    MatchResult,
    ParsedObject,
    RolloutOutput,
    Sample,
    normalized,
)

IOU_THRESHOLD = IOU_THRESHOLDS[0]
# Smallest IoU of a duplicate with an earlier object of its description (EVAL-02).
DUPLICATE_IOU = 0.9
# Smallest share of the image of an oversized object (EVAL-02).
OVERSIZED_SHARE = 0.95

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
Pairs = list[tuple[int, int]]
Described = ParsedObject | GroundTruthObject


class ScoredAnswer(LoggedAnswer):
    """An answer with its matches at IoU 0.5 and its scores.

    match: the hits, and a maximum matching of the other objects by location only.
    hits: pairs with equal descriptions. hits_at: maximum hits at each of `IOU_THRESHOLDS`.
    hits_of: hits_at by description (in Unicode NFC), without descriptions that have none.
    located: maximum pairs with descriptions ignored.
    duplicates: predictions that repeat an earlier one. oversized: judged predictions of nearly the
    whole image without a hit.
    precision: hits / judged predictions; recall: hits / ground truths; None for a division by zero.
    f1: as in `f1_of`.
    """

    hits: int
    hits_at: list[int]
    hits_of: dict[str, list[int]]
    located: int
    duplicates: int
    oversized: int
    precision: float | None
    recall: float | None
    f1: float

    @classmethod
    def scored(cls, assessed: AssessedRollout, resolution: int) -> "ScoredAnswer":
        """Score an answer. assessed: of `assess_by_name`. resolution: canvas side for polygons."""
        answer = LoggedAnswer.of(assessed)
        predicted, truths = assessed.parsed.objects, assessed.sample.objects
        iou, parse, match = assessed.match.mask_iou, answer.parse, answer.match
        objects = [
            item.model_copy(update={"confidence": confidence(found, answer.logprobs)})
            for item, found in zip(parse.objects, predicted, strict=True)
        ]
        ious, unjudged = [float(iou[pair]) for pair in match.pairs], _unjudged(assessed)
        parse = parse.model_copy(update={"objects": objects})
        match = match.model_copy(update={"ious": ious, "unjudged": unjudged})
        answer = answer.model_copy(update={"parse": parse, "match": match})
        judged = ~np.isin(np.arange(len(predicted)), unjudged)[:, None]
        named = judged & same_description(predicted, truths)
        pairs_at = [most_pairs(iou, named & (iou >= least)) for least in IOU_THRESHOLDS]
        hits = len(answer.hit_pairs)
        return cls(
            **dict(answer),
            hits=hits,
            hits_at=[len(pairs) for pairs in pairs_at],
            hits_of=_by_description(pairs_at, answer.ground_truth),
            located=len(most_pairs(iou, judged & (iou >= IOU_THRESHOLD))),
            duplicates=len(repeats(predicted, DUPLICATE_IOU, resolution)),
            oversized=_oversized(answer),
            precision=hits / answer.counted if answer.counted else None,
            recall=hits / len(truths) if truths else None,
            f1=f1_of(answer),
        )


# Scores among the metrics of a run; `scores.json` has all.
LOGGED = ("precision", "recall", "f1", "f1_95", "f1_miou", "box_f1")


@dataclass(frozen=True)
class Scores:
    """Scores over all objects of all answers; the fields are sums of those of `ScoredAnswer`.

    predicted: judged predictions. hits_at: for each of `IOU_THRESHOLDS`.
    """

    answers: int
    predicted: int
    ground_truths: int
    hits_at: tuple[int, ...]
    located: int
    dropped: int
    duplicates: int
    oversized: int

    @classmethod
    def of(cls, answers: Iterable[ScoredAnswer]) -> "Scores":
        answers = list(answers)
        places = range(len(IOU_THRESHOLDS))
        return cls(
            answers=len(answers),
            predicted=sum(answer.counted for answer in answers),
            ground_truths=sum(len(answer.ground_truth) for answer in answers),
            hits_at=tuple(sum(answer.hits_at[place] for answer in answers) for place in places),
            located=sum(answer.located for answer in answers),
            dropped=sum(len(answer.parse.dropped) for answer in answers),
            duplicates=sum(answer.duplicates for answer in answers),
            oversized=sum(answer.oversized for answer in answers),
        )

    @property
    def hits(self) -> int:
        return self.hits_at[0]

    def fractions(self) -> dict[str, tuple[int, int]]:
        """Return the numerator and the denominator of each score.

        f1_95: with hits from IoU 0.95. box_*: by location; the pairing ignores descriptions, too.
        """
        objects, hits = self.predicted + self.ground_truths, self.hits
        return {
            "precision": (hits, self.predicted),
            "recall": (hits, self.ground_truths),
            "f1": (2 * hits, objects),
            "f1_95": (2 * self.hits_at[-1], objects),
            "f1_miou": (2 * sum(self.hits_at), objects * len(self.hits_at)),
            "box_precision": (self.located, self.predicted),
            "box_recall": (self.located, self.ground_truths),
            "box_f1": (2 * self.located, objects),
        }

    def ratio(self, name: str) -> float:
        numerator, denominator = self.fractions()[name]
        return numerator / max(denominator, 1)

    def payload(self) -> Payload:
        payload, fractions = Payload(), self.fractions()
        payload.rate({f"eval/{name}": fractions[name] for name in LOGGED})
        faults = ("duplicates", "oversized")
        payload.rate({f"eval/{name}": (getattr(self, name), self.answers) for name in faults})
        counts = ("predicted", "ground_truths", "dropped")
        payload.add({f"eval/{name}": getattr(self, name) for name in counts})
        return payload


@dataclass(frozen=True)
class Evaluation:
    """answers: one per sample, in order. notes: metrics of the calls and of a push."""

    answers: list[ScoredAnswer]
    notes: Payload

    @property
    def scores(self) -> Scores:
        return Scores.of(self.answers)


def evaluate(
    config: Config,
    policy: Policy,
    samples: Sequence[Sample],
    seed: int,
    tokenizer: Tokenizer,
    log_calls: Callable[[dict[str, Any]], None] | None = None,
) -> Evaluation:
    """Roll out every sample with the newest pushed weights, and score the answers.

    log_calls: receives the record of the calls.
    """
    try:
        with waiting_for("the answers of an evaluation", policy.progress(len(samples))):
            outputs = policy.answer(samples, seed, evaluating=True)
    finally:
        record, notes = policy.take_notes(evaluating=True)
        if log_calls is not None:
            log_calls({"evaluation_seed": seed, **record})
    resolution, answers = config.rollout_matching.matching.maskiou_resolution, answer_format(config)
    assessed = (
        assess_by_name(
            *pair, tokenizer, allow_poly=config.allow_poly, resolution=resolution, answers=answers
        )
        for pair in zip(samples, outputs, strict=True)
    )
    return Evaluation([ScoredAnswer.scored(each, resolution) for each in assessed], notes)


def assess_by_name(
    sample: Sample,
    output: RolloutOutput,
    tokenizer: Tokenizer,
    *,
    allow_poly: bool,
    resolution: int,
    answers: AnswerFormat = COORD_JSON,
) -> AssessedRollout:
    match = partial(match_named, resolution=resolution, lists=sample.category_lists)
    return assess(sample, output, tokenizer, match, allow_poly=allow_poly, answers=answers)


def match_named(
    predicted: Sequence[ParsedObject],
    truths: Sequence[GroundTruthObject],
    resolution: int,
    lists: Mapping[str, Sequence[str]] | None = None,
) -> MatchResult:
    """Match the most hits at IoU 0.5; then the most pairs of the other objects by location only.

    lists: of LVIS, as in `Sample`. An unjudged prediction is neither paired nor a false positive.
    """
    iou = exact_iou(predicted, truths, resolution)
    near = iou >= IOU_THRESHOLD
    hits = most_pairs(iou, near & same_description(predicted, truths))
    hit = {p for p, _ in hits}
    lists = lists or {}
    unjudged = {p for p, o in enumerate(predicted) if left_open(o.desc, truths, lists)} - hit
    near[[*unjudged], :] = False
    for p, g in hits:
        near[p, :] = near[:, g] = False
    pairs = sorted(hits + most_pairs(iou, near))
    paired, matched = {p for p, _ in pairs}, {g for _, g in pairs}
    return MatchResult(
        pairs=pairs,
        false_positives=[p for p in range(len(predicted)) if p not in paired | unjudged],
        false_negatives=[g for g in range(len(truths)) if g not in matched],
        gated=int(np.count_nonzero(iou < IOU_THRESHOLD)),
        mask_iou=iou,
    )


def _unjudged(assessed: AssessedRollout) -> list[int]:
    """Return the predictions that are neither paired nor false positives."""
    match = assessed.match
    judged = {p for p, _ in match.pairs} | {*match.false_positives}
    return [p for p in range(len(assessed.parsed.objects)) if p not in judged]


def _by_description(
    pairs_at: Sequence[Pairs], truths: Sequence[LoggedObject]
) -> dict[str, list[int]]:
    counts = [Counter(normalized(truths[g].desc) for _, g in pairs) for pairs in pairs_at]
    names = sorted(set().union(*counts))
    return {name: [count[name] for count in counts] for name in names}


def _oversized(answer: LoggedAnswer) -> int:
    excluded = {p for p, _ in answer.hit_pairs} | {*answer.match.unjudged}
    most = OVERSIZED_SHARE * answer.width * answer.height
    areas = (pixel_area(o.shape, answer.width, answer.height) for o in answer.parse.objects)
    return sum(area >= most and p not in excluded for p, area in enumerate(areas))
