"""The gallery of a page: a card for each answer, with a picture, boxes and facts."""

import base64
import io
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from learner.analysis.report.answers import FAULTS, faults_of
from learner.data.images import UnreadableImage, open_upright
from learner.runs.declared import DROPS
from learner.runs.rollout_log import LoggedAnswer, LoggedObject, LoggedPrediction, StepAnswer, f1_of
from learner.stages.matching import mask_iou
from learner.types import GeometryKind, normalized

# Longest side in pixels of an embedded image, and of a lossless one.
LONGEST = 640
_LOSSLESS = 256
_QUALITY = 82
# Each thread holds a decoded image, up to hundreds of megabytes.
_THREADS = 4


def embed(path: Path) -> dict[str, Any]:
    """Return the upright image as a data URI, scaled down to `LONGEST`, with its size in pixels.

    `problem` says why an image cannot be read; else it is empty.
    """
    try:
        image = open_upright(path)
    except UnreadableImage as error:
        return {"src": "", "width": 0, "height": 0, "problem": f"{path} {error}"}
    image.thumbnail((LONGEST, LONGEST))
    file = io.BytesIO()
    image.save(file, "webp", lossless=max(image.size) <= _LOSSLESS, quality=_QUALITY)
    src = f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"src": src, "width": image.width, "height": image.height, "problem": ""}


Role = Literal["truth", "match", "stray", "unjudged", "removed", "missed", "appended"]

# Role of a shape in a picture -> its name and meaning.
ROLES: dict[Role, tuple[str, str]] = {
    "truth": ("ground truth, matched", "a prediction is matched to it"),
    "match": ("prediction, matched", "matched to a ground truth"),
    "stray": ("false positive", "a prediction without a match"),
    "unjudged": ("not judged", "LVIS's lists leave open whether such an object is there"),
    "removed": ("duplicate, removed", "it repeats another prediction; a clean prefix has one"),
    "missed": ("missed", "a ground truth without a match"),
    "appended": ("missed, appended", "a missed ground truth, appended to what is trained on"),
}


@dataclass(frozen=True)
class ShownObject:
    """coords: bins, flat x, y, x, y, .... pair: index of its partner in the list of objects.

    confidence: of a prediction, if its answer has log-probabilities.
    """

    role: Role
    key: str
    desc: str
    kind: GeometryKind
    coords: list[int]
    iou: float | None = None
    pair: int | None = None
    confidence: float | None = None


def gallery(
    answers: Sequence[LoggedAnswer], logged: int, resolution: int, replay: str = ""
) -> dict[str, Any]:
    """Return the data for `gallery.js`; an image of several answers is embedded once.

    logged: number of all answers. resolution: canvas side for overlaps.
    replay: the command that replays a step, without the step; empty in an evaluation.
    """
    places: dict[Path, int] = {}
    for answer in answers:
        places.setdefault(answer.images[0], len(places))
    with ThreadPoolExecutor(_THREADS) as pool:
        pictures = list(pool.map(embed, places))
    cards = [
        _card(answer, f"answer-{number}", places[answer.images[0]], resolution)
        for number, answer in enumerate(answers, start=1)
    ]
    return {
        "cards": cards,
        "pictures": pictures,
        "faults": list(FAULTS),
        "roles": ROLES,
        "drops": DROPS,
        "logged": logged,
        "replay": replay,
    }


def _card(answer: LoggedAnswer, slug: str, picture: int, resolution: int) -> dict[str, Any]:
    """Return the card of an answer. slug: its anchor. picture: index in the list of pictures.

    In the card: step from 1, None in an evaluation; width and height in pixels of the data file.
    """
    step = answer.step if isinstance(answer, StepAnswer) else None
    name = Path(answer.sample_id).name
    return {
        "slug": slug,
        "name": name,
        "step": step,
        "replay": "" if step is None else f"--step {step} --sample {shlex.quote(name)}",
        "f1": round(f1_of(answer), 4),
        "faults": faults_of(answer),
        "facts": facts_of(answer),
        "objects": [asdict(each) for each in shown_objects(answer, resolution)],
        "dropped": answer.parse.dropped,
        "text": answer.text,
        "picture": picture,
        "width": answer.width,
        "height": answer.height,
    }


def facts_of(answer: LoggedAnswer) -> dict[str, str]:
    version = " to ".join(map(str, dict.fromkeys(answer.weights_version)))
    predicted = answer.counted + len(answer.parse.duplicates)
    facts = {
        "step": answer.step if isinstance(answer, StepAnswer) else None,
        "sample": answer.sample_id,
        "image": f"{answer.images[0]}, {answer.width} x {answer.height}",
        "further images": len(answer.images) - 1,
        "ended by": answer.finish_reason or "unknown",
        "length": f"{len(answer.response_token_ids)} tokens",
        "seed": None if answer.seed is None else str(answer.seed),
        "weights": f"version {version}",
        "learner process": answer.rank if isinstance(answer, StepAnswer) else None,
        "objects": f"{predicted} predicted, {len(answer.ground_truth)} annotated, "
        f"{len(answer.hit_pairs)} hits",
        "not trained on": answer.left_out,
    }
    return {name: str(value) for name, value in facts.items() if value}


def shown_objects(answer: LoggedAnswer, resolution: int) -> list[ShownObject]:
    """Return predictions, then ground truths, then removed duplicates, each in order."""
    predictions, truths = answer.parse.objects, answer.ground_truth
    pairs, ious = answer.match.pairs, answer.match.ious
    if ious is None:
        ious = [mask_iou(predictions[p].shape, truths[g].shape, resolution) for p, g in pairs]
    overlaps = [(p, g, round(iou, 4)) for (p, g), iou in zip(pairs, ious, strict=True)]
    of_prediction = {p: (len(predictions) + g, iou) for p, g, iou in overlaps}
    of_truth = {g: (p, iou) for p, g, iou in overlaps}
    objects = []
    for place, prediction in enumerate(predictions):
        role: Role = "match" if place in of_prediction else "stray"
        if place in answer.match.unjudged:
            role = "unjudged"
        objects.append(_shown(prediction, role, prediction.key, of_prediction.get(place)))
    for place, truth in enumerate(truths):
        role = "appended" if answer.target and answer.target.keys else "missed"
        if place in of_truth:
            role = "truth"
        objects.append(_shown(truth, role, f"ground truth {place + 1}", of_truth.get(place)))
    return [*objects, *(_shown(each, "removed", each.key) for each in answer.parse.duplicates)]


def _shown(
    item: LoggedObject, role: Role, key: str, partner: tuple[int, float] | None = None
) -> ShownObject:
    """Return an object of a picture. partner: its index in the list of objects, and the IoU."""
    pair, iou = partner or (None, None)
    sure = item.confidence if isinstance(item, LoggedPrediction) else None
    return ShownObject(role, key, normalized(item.desc), item.kind, item.coords, iou, pair, sure)
