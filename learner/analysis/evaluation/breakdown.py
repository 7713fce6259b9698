"""What the numbers of an evaluation are made of: by description, IoU, size, and what was confused.

ScoredAnswer -> Breakdown: `breakdown` in `scores.json`, and the tables of the page
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

import numpy as np

from learner.analysis.evaluation.detections import CategoryPrecision
from learner.analysis.evaluation.scores import IOU_THRESHOLDS, FloatArray, ScoredAnswer
from learner.data.coco import pixel_area
from learner.runs.rollout_log import LoggedAnswer, LoggedObject
from learner.types import normalized

SizeName = Literal["small", "medium", "large"]

# Square pixels of the image, from and to; COCO's areas.
SIZES: dict[SizeName, tuple[float, float]] = {
    "small": (0, 32**2),
    "medium": (32**2, 96**2),
    "large": (96**2, inf),
}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Some of the objects. A score is None where it would divide by nothing."""

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
    """f1_95, f1_miou: where a hit needs an IoU of 0.95, and the mean over `IOU_THRESHOLDS`.

    ap, ap50: COCO's of its boxes; None where it is no ground truth's.
    """

    name: str
    f1_95: float
    f1_miou: float
    ap: float | None
    ap50: float | None


@dataclass(frozen=True, kw_only=True)
class AtThreshold(Counts):
    """All objects, where a hit needs this IoU."""

    iou: float


@dataclass(frozen=True, kw_only=True)
class OfSize(Counts):
    """Ground truths of a size. Predicted are those that hit them, and others of this size.

    So every prediction is counted once, and a hit of another size than its truth is no error.
    """

    size: SizeName


@dataclass(frozen=True)
class Confused:
    """How many objects of one description were answered as another.

    truth: None for predictions at whose place no object is. predicted: None for missed objects.
    """

    truth: str | None
    predicted: str | None
    count: int


@dataclass(frozen=True)
class Breakdown:
    """descriptions: by name. thresholds: 0.50 to 0.95. sizes: small, medium, large.

    confusion: every pair that occurs, the most frequent first. Hits are taken out first, and what
    is left is paired by place alone; so the pairs of equal names are the hits, the counts of one
    truth are its ground truths, and those of one predicted name its predictions.
    """

    descriptions: tuple[OfDescription, ...]
    thresholds: tuple[AtThreshold, ...]
    sizes: tuple[OfSize, ...]
    confusion: tuple[Confused, ...]

    @classmethod
    def of(
        cls, answers: Sequence[ScoredAnswer], categories: Iterable[CategoryPrecision]
    ) -> "Breakdown":
        """categories: with the AP of each description, as `Detected` has them of boxes."""
        confusion = Counter(pair for answer in answers for pair in _named_pairs(answer))
        return cls(
            tuple(_descriptions(confusion, _sum_of_hits(answers), categories)),
            tuple(_thresholds(answers)),
            tuple(_sizes(answers)),
            tuple(Confused(*pair, count) for pair, count in sorted(confusion.items(), key=_rank)),
        )

    def worst(self, count: int) -> list[OfDescription]:
        """Descriptions of the lowest F1 that are a ground truth's, the frequent ones first."""
        there = [each for each in self.descriptions if each.ground_truths]
        return sorted(there, key=lambda each: (each.f1, -each.ground_truths, each.name))[:count]

    def numbers(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "descriptions": [each.numbers() for each in self.descriptions],
            "thresholds": [each.numbers() for each in self.thresholds],
            "sizes": [each.numbers() for each in self.sizes],
            "confusion": [asdict(each) for each in self.confusion],
        }


NamedPair = tuple[str | None, str | None]


def _named_pairs(answer: LoggedAnswer) -> Iterator[NamedPair]:
    """(truth, predicted) of every object that is judged, paired or alone."""
    truths = [normalized(item.desc) for item in answer.ground_truth]
    said = [normalized(item.desc) for item in answer.parse.objects]
    yield from ((truths[g], said[p]) for p, g in answer.match.pairs)
    yield from ((truths[g], None) for g in answer.match.false_negatives)
    yield from ((None, said[p]) for p in answer.match.false_positives)


def _rank(counted: tuple[NamedPair, int]) -> tuple[int, str, str]:
    (truth, predicted), count = counted
    return -count, truth or "", predicted or ""


def _sum_of_hits(answers: Iterable[ScoredAnswer]) -> dict[str, FloatArray]:
    """Of each description that has any, at each threshold."""
    hits: dict[str, FloatArray] = {}
    for answer in answers:
        for name, counts in answer.hits_of.items():
            hits[name] = hits.get(name, 0) + np.array(counts, dtype=float)
    return hits


def _descriptions(
    confusion: Counter[NamedPair],
    hits_of: Mapping[str, FloatArray],
    categories: Iterable[CategoryPrecision],
) -> Iterator[OfDescription]:
    """hits_of: each description at each threshold; one that is not there has none."""
    precise = {category.name: category for category in categories}
    truths, said, hits = Counter[str](), Counter[str](), Counter[str]()
    for (truth, predicted), count in confusion.items():
        if truth is not None:
            truths[truth] += count
        if predicted is not None:
            said[predicted] += count
        if truth is not None and truth == predicted:
            hits[truth] += count
    none = np.zeros(len(IOU_THRESHOLDS))
    for name in sorted({*truths, *said}):
        f1 = 2 * hits_of.get(name, none) / (said[name] + truths[name])
        yield OfDescription(
            name=name,
            hits=hits[name],
            predicted=said[name],
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
    truths, said, hits = Counter[SizeName](), Counter[SizeName](), Counter[SizeName]()
    for answer in answers:
        sizes = [_size(item, answer) for item in answer.ground_truth]
        truths.update(sizes)
        hit = {p: sizes[g] for p, g in answer.hit_pairs}
        hits.update(hit.values())
        unjudged = {*answer.match.unjudged}
        judged = (each for each in enumerate(answer.parse.objects) if each[0] not in unjudged)
        said.update(hit.get(p) or _size(o, answer) for p, o in judged)
    for size in SIZES:
        yield OfSize(size=size, hits=hits[size], predicted=said[size], ground_truths=truths[size])


def _size(item: LoggedObject, answer: LoggedAnswer) -> SizeName:
    """Areas on a border are of the smaller size."""
    area = pixel_area(item.shape, answer.width, answer.height)
    return next(size for size, (_, most) in SIZES.items() if area <= most)
