"""The parts of an evaluation: by description, IoU and size, and the confused descriptions.

ScoredAnswer -> Breakdown    `breakdown` in `scores.json`, and the tables of the page
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import numpy as np

from learner.analysis.evaluation.detections import CategoryPrecision
from learner.analysis.evaluation.scores import FloatArray, ScoredAnswer
from learner.data.coco import pixel_area
from learner.runs.rollout_log import LoggedAnswer, LoggedObject
from learner.stages.matching import IOU_THRESHOLDS
from learner.types import normalized

# The largest area of each size in square pixels, as COCO has them.
SIZES = {"small": 32**2, "medium": 96**2, "large": inf}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of some of the objects. A score is None where it would divide by zero."""

    hits: int
    predicted: int
    ground_truths: int

    @property
    def precision(self) -> float | None:
        return self.hits / self.predicted if self.predicted else None

    @property
    def recall(self) -> float | None:
        return self.hits / self.ground_truths if self.ground_truths else None

    @property
    def f1(self) -> float | None:
        both = self.predicted + self.ground_truths
        return 2 * self.hits / both if both else None

    def numbers(self) -> dict[str, Any]:
        """Counts and scores, for JSON."""
        scores = {name: getattr(self, name) for name in ("precision", "recall", "f1")}
        return {**asdict(self), **scores}


@dataclass(frozen=True, kw_only=True)
class OfDescription(Counts):
    """f1_95: with hits from IoU 0.95. f1_miou: the mean over `IOU_THRESHOLDS`.

    ap, ap50: COCO's AP of its boxes; None without ground truth.
    """

    name: str
    f1_95: float
    f1_miou: float
    ap: float | None
    ap50: float | None


@dataclass(frozen=True, kw_only=True)
class AtThreshold(Counts):
    """All objects, with hits from this IoU."""

    iou: float


@dataclass(frozen=True, kw_only=True)
class OfSize(Counts):
    """Ground truths of a size, the predictions that hit them, and other predictions of the size."""

    size: str


@dataclass(frozen=True)
class Confused:
    """count: objects of the description `truth` that were predicted as `predicted`.

    truth: None for predictions where no object is. predicted: None for missed objects.
    """

    truth: str | None
    predicted: str | None
    count: int


@dataclass(frozen=True)
class Breakdown:
    """descriptions: by name. thresholds: 0.50 to 0.95. sizes: small, medium, large.

    confusion: every pair, the most frequent first. Pairs of equal names are the hits; the others
    are paired by place alone. Every ground truth and every judged prediction is in one pair.
    """

    descriptions: tuple[OfDescription, ...]
    thresholds: tuple[AtThreshold, ...]
    sizes: tuple[OfSize, ...]
    confusion: tuple[Confused, ...]

    @classmethod
    def of(
        cls, answers: Sequence[ScoredAnswer], categories: Iterable[CategoryPrecision]
    ) -> "Breakdown":
        """categories: the AP of each description by boxes, as in `Detected`."""
        confusion = Counter(pair for answer in answers for pair in _named_pairs(answer))
        return cls(
            tuple(_descriptions(answers, confusion, categories)),
            tuple(_thresholds(answers)),
            tuple(_sizes(answers)),
            tuple(Confused(*pair, count) for pair, count in sorted(confusion.items(), key=_rank)),
        )

    def worst(self, count: int) -> list[OfDescription]:
        """Annotated descriptions with the lowest F1; of equal ones the frequent ones first."""
        annotated = [each for each in self.descriptions if each.ground_truths]
        return sorted(annotated, key=lambda each: (each.f1, -each.ground_truths, each.name))[:count]

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        parts = {"descriptions": self.descriptions, "thresholds": self.thresholds}
        counts = {name: [each.numbers() for each in rows] for name, rows in parts.items()}
        sizes = [each.numbers() for each in self.sizes]
        return {**counts, "sizes": sizes, "confusion": [asdict(each) for each in self.confusion]}


NamedPair = tuple[str | None, str | None]


def _named_pairs(answer: LoggedAnswer) -> Iterator[NamedPair]:
    """(truth, predicted) of every judged object, paired or alone."""
    truths = [normalized(item.desc) for item in answer.ground_truth]
    predicted = [normalized(item.desc) for item in answer.parse.objects]
    yield from ((truths[g], predicted[p]) for p, g in answer.match.pairs)
    yield from ((truths[g], None) for g in answer.match.false_negatives)
    yield from ((None, predicted[p]) for p in answer.match.false_positives)


def _rank(counted: tuple[NamedPair, int]) -> tuple[int, str, str]:
    (truth, predicted), count = counted
    return -count, truth or "", predicted or ""


def _descriptions(
    answers: Sequence[ScoredAnswer],
    confusion: Counter[NamedPair],
    categories: Iterable[CategoryPrecision],
) -> Iterator[OfDescription]:
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
        yield OfDescription(
            name=name,
            hits=confusion[name, name],
            predicted=predicted[name],
            ground_truths=truths[name],
            f1_95=float(f1[-1]),
            f1_miou=float(f1.mean()),
            ap=precise[name].ap,
            ap50=precise[name].ap50,
        )


def _thresholds(answers: Sequence[ScoredAnswer]) -> Iterator[AtThreshold]:
    predicted = sum(answer.counted for answer in answers)
    truths = sum(len(answer.ground_truth) for answer in answers)
    for place, iou in enumerate(IOU_THRESHOLDS):
        hits = sum(answer.hits_at[place] for answer in answers)
        yield AtThreshold(iou=iou, hits=hits, predicted=predicted, ground_truths=truths)


def _sizes(answers: Iterable[LoggedAnswer]) -> Iterator[OfSize]:
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
        counts = {"predicted": predicted[size], "ground_truths": truths[size]}
        yield OfSize(size=size, hits=hits[size], **counts)


def _size(item: LoggedObject, answer: LoggedAnswer) -> str:
    """An area on a border has the smaller size."""
    area = pixel_area(item.shape, answer.width, answer.height)
    return next(size for size, most in SIZES.items() if area <= most)
