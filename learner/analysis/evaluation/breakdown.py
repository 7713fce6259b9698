"""The parts of an evaluation: by description, IoU and size, and the confused descriptions.

ScoredAnswer -> breakdown    `breakdown` in `scores.json`, and the tables of the page
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any

import numpy as np

from learner.analysis.evaluation.detections import CategoryPrecision
from learner.analysis.evaluation.scores import FloatArray, ScoredAnswer
from learner.data.coco import pixel_area
from learner.runs.rollout_log import LoggedAnswer, LoggedObject
from learner.stages.matching import IOU_THRESHOLDS
from learner.types import normalized

# Largest area of each size in square pixels, as in COCO.
SIZES = {"small": 32**2, "medium": 96**2, "large": inf}


Row = dict[str, Any]


def breakdown(
    answers: Sequence[ScoredAnswer], categories: Iterable[CategoryPrecision]
) -> dict[str, list[Row]]:
    """Return the rows of each part, for JSON. A score is None for a division by zero.

    descriptions: by name. f1_95: F1 at IoU 0.95. f1_miou: mean F1 over `IOU_THRESHOLDS`. ap, ap50:
    COCO's AP of boxes; None without ground truth.
    thresholds: all objects, at each of `IOU_THRESHOLDS`.
    sizes: small, medium and large ground truths; a hit has the size of its ground truth, another
    prediction its own.
    confusion: pairs of descriptions, the most frequent first. truth: None for false positives.
    predicted: None for missed objects. Pairs with equal names are hits; other pairs are matched by
    location only. Each ground truth and each judged prediction is in one pair.

    categories: the AP of each description by boxes, as in `Detected`.
    """
    confusion = Counter(pair for answer in answers for pair in _named_pairs(answer))
    # The most frequent first, then by names.
    pairs = sorted(confusion.items(), key=lambda p: (-p[1], p[0][0] or "", p[0][1] or ""))
    return {
        "descriptions": list(_descriptions(answers, confusion, categories)),
        "thresholds": list(_thresholds(answers)),
        "sizes": list(_sizes(answers)),
        "confusion": [{"truth": t, "predicted": p, "count": count} for (t, p), count in pairs],
    }


def _counts(hits: int, predicted: int, ground_truths: int) -> Row:
    """Return counts with their precision, recall and F1."""
    both = predicted + ground_truths
    return {
        "hits": hits,
        "predicted": predicted,
        "ground_truths": ground_truths,
        "precision": hits / predicted if predicted else None,
        "recall": hits / ground_truths if ground_truths else None,
        "f1": 2 * hits / both if both else None,
    }


NamedPair = tuple[str | None, str | None]


def _named_pairs(answer: LoggedAnswer) -> Iterator[NamedPair]:
    """Yield (truth, predicted) for every pair, missed object and false positive."""
    truths = [normalized(item.desc) for item in answer.ground_truth]
    predicted = [normalized(item.desc) for item in answer.parse.objects]
    yield from ((truths[g], predicted[p]) for p, g in answer.match.pairs)
    yield from ((truths[g], None) for g in answer.match.false_negatives)
    yield from ((None, predicted[p]) for p in answer.match.false_positives)


def _descriptions(
    answers: Sequence[ScoredAnswer],
    confusion: Counter[NamedPair],
    categories: Iterable[CategoryPrecision],
) -> Iterator[Row]:
    precise = {category.name: category for category in categories}
    truths, predicted = Counter[str](), Counter[str]()
    for (truth, answered), count in confusion.items():
        if truth is not None:
            truths[truth] += count
        if answered is not None:
            predicted[answered] += count
    hits_at: dict[str, FloatArray] = {}
    for answer in answers:
        for name, counts in answer.hits_of.items():
            hits_at[name] = hits_at.get(name, 0) + np.array(counts, dtype=float)
    for name in sorted({*truths, *predicted}):
        f1 = 2 * hits_at.get(name, np.zeros(len(IOU_THRESHOLDS))) / (predicted[name] + truths[name])
        yield {
            "name": name,
            **_counts(confusion[name, name], predicted[name], truths[name]),
            "f1_95": float(f1[-1]),
            "f1_miou": float(f1.mean()),
            "ap": precise[name].ap,
            "ap50": precise[name].ap50,
        }


def _thresholds(answers: Sequence[ScoredAnswer]) -> Iterator[Row]:
    predicted = sum(answer.counted for answer in answers)
    truths = sum(len(answer.ground_truth) for answer in answers)
    for place, iou in enumerate(IOU_THRESHOLDS):
        hits = sum(answer.hits_at[place] for answer in answers)
        yield {"iou": iou, **_counts(hits, predicted, truths)}


def _sizes(answers: Iterable[LoggedAnswer]) -> Iterator[Row]:
    truths, predicted, hits = Counter[str](), Counter[str](), Counter[str]()
    for answer in answers:
        sizes = [_size(item, answer) for item in answer.ground_truth]
        truths.update(sizes)
        hit = {p: sizes[g] for p, g in answer.hit_pairs}
        hits.update(hit.values())
        for p, item in enumerate(answer.parse.objects):
            if p not in answer.match.unjudged:
                predicted[hit.get(p) or _size(item, answer)] += 1
    for size in SIZES:
        yield {"size": size, **_counts(hits[size], predicted[size], truths[size])}


def _size(item: LoggedObject, answer: LoggedAnswer) -> str:
    """Return the size of an object; an area equal to a limit belongs to the smaller size."""
    area = pixel_area(item.shape, answer.width, answer.height)
    return next(size for size, most in SIZES.items() if area <= most)
