"""An answer as the gallery shows it: everything the page needs to know, as JSON."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from learner.matching import mask_iou
from learner.report.outcomes import FaultName, faults_of
from learner.report.pictures import Picture, embed_all
from learner.rollout_log import (
    LoggedAnswer,
    LoggedObject,
    LoggedPrediction,
    StepAnswer,
    f1_of,
    hits_of,
)
from learner.types import GeometryKind

# What a shape in a picture is.
#   truth       a ground truth that a prediction is matched to
#   match       a prediction that is matched to a ground truth
#   stray       a prediction that is not
#   missed      a ground truth that no prediction is matched to
#   appended    a missed one that the answer was trained to append
Role = Literal["truth", "match", "stray", "missed", "appended"]

ROLES: dict[Role, tuple[str, str]] = {
    "truth": ("ground truth, matched", "a prediction is matched to it"),
    "match": ("prediction, matched", "matched to a ground truth"),
    "stray": ("false positive", "a prediction without a match"),
    "missed": ("missed", "a ground truth without a match"),
    "appended": ("missed, appended", "a missed ground truth, appended to what is trained on"),
}


@dataclass(frozen=True)
class ShownObject:
    """coords: bins, flat x, y, x, y, .... pair: place of its partner in the list of objects."""

    role: Role
    key: str
    desc: str
    kind: GeometryKind
    coords: list[int]
    iou: float | None = None
    pair: int | None = None


@dataclass(frozen=True)
class Card:
    """slug: the page has it at `#slug`. name: the end of the sample's id.

    step: counted from 1; None in an evaluation. replay: what the command that replays takes; empty
    in an evaluation. width, height: pixels of the image as the data file has them. picture: place
    in the list of pictures. truths, predicted, hits, missed: how many. left_out: why it was not
    trained on.
    """

    slug: str
    sample_id: str
    name: str
    step: int | None
    replay: str
    rank: int
    seed: int | None
    version: tuple[int, int]
    finish: str
    tokens: int
    f1: float
    faults: list[FaultName]
    truths: int
    predicted: int
    hits: int
    missed: int
    objects: list[ShownObject]
    dropped: list[tuple[str, str]]
    left_out: str | None
    text: str
    picture: int
    images: int
    width: int
    height: int
    file: str


def cards_of(answers: Sequence[LoggedAnswer], resolution: int) -> tuple[list[Card], list[Picture]]:
    """Cards in the order of the answers; an image that several show is embedded once.

    resolution: of the canvas on which overlaps are measured.
    """
    places: dict[Path, int] = {}
    for answer in answers:
        places.setdefault(answer.images[0], len(places))
    slugs = _unique(map(_slug, answers))
    cards = [
        _card(answer, slug, places[answer.images[0]], resolution)
        for answer, slug in zip(answers, slugs, strict=True)
    ]
    return cards, embed_all(list(places))


def _card(answer: LoggedAnswer, slug: str, picture: int, resolution: int) -> Card:
    step = answer.step if isinstance(answer, StepAnswer) else None
    name = Path(answer.sample_id).name
    return Card(
        slug=slug,
        sample_id=answer.sample_id,
        name=name,
        step=step,
        replay="" if step is None else f"--step {step} --sample {shlex.quote(name)}",
        rank=answer.rank if isinstance(answer, StepAnswer) else 0,
        seed=answer.seed,
        version=answer.weights_version,
        finish=answer.finish_reason or "not told",
        tokens=len(answer.response_token_ids),
        f1=round(f1_of(answer), 4),
        faults=faults_of(answer),
        truths=len(answer.ground_truth),
        predicted=len(answer.parse.objects),
        hits=hits_of(answer),
        missed=len(answer.match.false_negatives),
        objects=shown_objects(answer, resolution),
        dropped=answer.parse.dropped,
        left_out=answer.left_out,
        text=answer.text,
        picture=picture,
        images=len(answer.images),
        width=answer.width,
        height=answer.height,
        file=str(answer.images[0]),
    )


def shown_objects(answer: LoggedAnswer, resolution: int) -> list[ShownObject]:
    """Predictions in the order of the answer, then ground truths in the order of the sample."""
    predictions, truths = answer.parse.objects, answer.ground_truth
    ious = {
        pair: round(mask_iou(predictions[pair[0]], truths[pair[1]], resolution), 4)
        for pair in answer.match.pairs
    }
    of_prediction = {p: (g, iou) for (p, g), iou in ious.items()}
    of_truth = {g: (p, iou) for (p, g), iou in ious.items()}
    unmatched: Role = "appended" if answer.supervised else "missed"
    return [
        *_shown(predictions, of_prediction, ("match", "stray"), len(predictions)),
        *_shown(truths, of_truth, ("truth", unmatched), 0),
    ]


def _shown(
    objects: Sequence[LoggedObject],
    partners: dict[int, tuple[int, float]],
    roles: tuple[Role, Role],
    partners_begin: int,
) -> Iterator[ShownObject]:
    """roles: with and without a partner."""
    for place, item in enumerate(objects):
        partner, iou = partners.get(place, (None, None))
        yield ShownObject(
            role=roles[partner is None],
            key=item.key if isinstance(item, LoggedPrediction) else f"ground truth {place + 1}",
            desc=item.desc,
            kind=item.kind,
            coords=item.coords,
            iou=iou,
            pair=None if partner is None else partners_begin + partner,
        )


def _slug(answer: LoggedAnswer) -> str:
    """`sample-74-train.jsonl-3451`: letters and digits of any script, `.`, `_` and `-` alone."""
    name = re.sub(r"[^\w.-]+", "-", Path(answer.sample_id).name)
    step = f"{answer.step}-" if isinstance(answer, StepAnswer) else ""
    return f"sample-{step}{name}"


def _unique(slugs: Iterator[str]) -> Iterator[str]:
    """With a number behind each but the first of those that are equal."""
    seen: Counter[str] = Counter()
    taken: set[str] = set()
    for slug in slugs:
        unique = slug
        while unique in taken:
            seen[slug] += 1
            unique = f"{slug}--{seen[slug] + 1}"
        taken.add(unique)
        yield unique
