"""Answers of an evaluation, put together by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from learner.analysis.evaluation.scores import ScoredAnswer, match_named
from learner.types import (
    AssessedRollout,
    GroundTruthObject,
    ParsedObject,
    ParsedRollout,
    Sample,
    Shape,
)
from tests.unit.small_run import rollout

DATA = Path("/data/val.jsonl")
RESOLUTION = 256


def box(desc: str, *coords: int) -> GroundTruthObject:
    return GroundTruthObject(desc, Shape("bbox_2d", coords))


def poly(desc: str, *coords: int) -> GroundTruthObject:
    return GroundTruthObject(desc, Shape("poly", coords))


def sample(
    line: int, objects: Sequence[GroundTruthObject], side: int = 64, image: Path | None = None
) -> Sample:
    """The sample of a line of `DATA`; its image is square."""
    path = image or DATA.parent / "images" / f"{line}.png"
    return Sample(f"{DATA}:{line}", (path,), side, side, tuple(objects))


def answered(
    given: Sample, predicted: Sequence[GroundTruthObject], text: str = "{}"
) -> ScoredAnswer:
    """An answer with these objects; text: as it is logged."""
    objects = [
        ParsedObject(f"object_{n}", n, o.shape.kind, list(o.shape.coords), o.desc, [], (0, 0), [])
        for n, o in enumerate(predicted, start=1)
    ]
    parsed = ParsedRollout(objects, [], [], len(objects), False, False, [])
    match = match_named(objects, given.objects, RESOLUTION, given.category_lists)
    output = replace(rollout([], []), text=text)
    return ScoredAnswer.scored(AssessedRollout(given, output, parsed, match), RESOLUTION)


Case = tuple[Sequence[GroundTruthObject], Sequence[GroundTruthObject]]


def answers(*cases: Case, side: int = 64) -> list[ScoredAnswer]:
    """cases: (ground truth, predictions), of one image each."""
    return [
        answered(sample(line, there, side), predicted)
        for line, (there, predicted) in enumerate(cases, 1)
    ]
