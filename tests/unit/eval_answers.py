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


def answered(asked: Sample, said: Sequence[GroundTruthObject], text: str = "{}") -> ScoredAnswer:
    """An answer that says these objects; text: as it is logged."""
    objects = [
        ParsedObject(f"object_{n}", n, o.shape.kind, list(o.shape.coords), o.desc, [], (0, 0), [])
        for n, o in enumerate(said, start=1)
    ]
    parsed = ParsedRollout(objects, [], [], len(objects), False, False, [])
    match = match_named(objects, asked.objects, RESOLUTION, asked.category_lists)
    output = replace(rollout([], []), text=text)
    return ScoredAnswer.scored(AssessedRollout(asked, output, parsed, match), RESOLUTION)


Case = tuple[Sequence[GroundTruthObject], Sequence[GroundTruthObject]]


def answers(*cases: Case, side: int = 64) -> list[ScoredAnswer]:
    """cases: (what is there, what is said), of one image each."""
    return [
        answered(sample(line, there, side), said) for line, (there, said) in enumerate(cases, 1)
    ]
