"""Pages of answers as pictures with boxes, and of the scores of an evaluation."""

import base64
import io
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from learner.analysis.report.answers import FAULTS, choose, drop_meanings, faults_of
from learner.analysis.report.page import asset, publish_page
from learner.analysis.report.run_view import Tile
from learner.config.rollout_matching import MatchingConfig
from learner.data.images import UnreadableImage, large_images_allowed, open_upright
from learner.runs.console import counted, fraction, score
from learner.runs.rollout_log import LoggedAnswer, LoggedObject, LoggedPrediction, StepAnswer, f1_of
from learner.stages.matching import mask_iou
from learner.types import GeometryKind, normalized

# The longer side of an embedded image, in pixels.
LONGEST = 640
_JPEG_QUALITY = 82
# Each holds a decoded image, which may be of hundreds of megabytes.
_AT_ONCE = 4


@dataclass(frozen=True)
class Picture:
    """src: a data URI; empty where the image cannot be read, and problem says why.

    width, height: pixels of the embedded image.
    """

    src: str = ""
    width: int = 0
    height: int = 0
    problem: str = ""


def embed_all(paths: Sequence[Path]) -> list[Picture]:
    """A picture for each path, several at a time."""
    with large_images_allowed(), ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(embed, paths))


def embed(path: Path) -> Picture:
    """The image as it is seen upright, not larger than `LONGEST`; never enlarged."""
    try:
        image = open_upright(path)
    except UnreadableImage as error:
        return Picture(problem=f"{path} {error}")
    image.thumbnail((LONGEST, LONGEST))
    encoded = {}
    for kind in ("png", "jpeg"):
        file = io.BytesIO()
        image.save(file, kind, **({"quality": _JPEG_QUALITY} if kind == "jpeg" else {}))
        encoded[kind] = file.getvalue()
    kind, content = min(encoded.items(), key=lambda item: len(item[1]))
    src = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return Picture(src, image.width, image.height)


# What a shape in a picture is.
#   truth       a ground truth that a prediction is matched to
#   match       a prediction that is matched to a ground truth
#   stray       a prediction that is not
#   unjudged    one that LVIS's lists do not judge
#   removed     one that repeats another, and was removed before the match
#   missed      a ground truth that no prediction is matched to
#   appended    a missed one that the answer was trained to append
Role = Literal["truth", "match", "stray", "unjudged", "removed", "missed", "appended"]

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
    """coords: bins, flat x, y, x, y, .... pair: place of its partner in the list of objects.

    confidence: of a prediction, where its answer has log-probabilities.
    """

    role: Role
    key: str
    desc: str
    kind: GeometryKind
    coords: list[int]
    iou: float | None = None
    pair: int | None = None
    confidence: float | None = None


# What the page's script takes of an answer; `_card` makes it.
Card = dict[str, Any]


def cards_of(answers: Sequence[LoggedAnswer], resolution: int) -> tuple[list[Card], list[Picture]]:
    """Cards in the order of the answers; an image that several show is embedded once.

    resolution: of the canvas on which a run measures overlaps.
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
    """slug: the page has it at `#slug`. picture: place in the list of pictures.

    name: the end of the sample's id. step: counted from 1; None in an evaluation. replay: what the
    command that replays takes; empty in an evaluation. width, height: pixels of the image as the
    data file has them. left_out: why it was not trained on.
    """
    step = answer.step if isinstance(answer, StepAnswer) else None
    name = Path(answer.sample_id).name
    return {
        "slug": slug,
        "sample_id": answer.sample_id,
        "name": name,
        "step": step,
        "replay": "" if step is None else f"--step {step} --sample {shlex.quote(name)}",
        "rank": answer.rank if isinstance(answer, StepAnswer) else 0,
        "seed": answer.seed,
        "version": answer.weights_version,
        "finish": answer.finish_reason or "not told",
        "tokens": len(answer.response_token_ids),
        "f1": round(f1_of(answer), 4),
        "faults": faults_of(answer),
        "truths": len(answer.ground_truth),
        "predicted": answer.counted + len(answer.parse.duplicates),
        "hits": len(answer.hit_pairs),
        "missed": len(answer.match.false_negatives),
        "objects": [asdict(each) for each in shown_objects(answer, resolution)],
        "dropped": answer.parse.dropped,
        "left_out": answer.left_out,
        "text": answer.text,
        "picture": picture,
        "images": len(answer.images),
        "width": answer.width,
        "height": answer.height,
        "file": str(answer.images[0]),
    }


def shown_objects(answer: LoggedAnswer, resolution: int) -> list[ShownObject]:
    """Predictions and ground truths in their order, then the duplicates that were removed."""
    predictions, truths = answer.parse.objects, answer.ground_truth
    pairs, ious = answer.match.pairs, answer.match.ious
    if ious is None:
        ious = [mask_iou(predictions[p], truths[g], resolution) for p, g in pairs]
    overlap = {pair: round(iou, 4) for pair, iou in zip(pairs, ious, strict=True)}
    of_prediction = {p: (g, iou) for (p, g), iou in overlap.items()}
    of_truth = {g: (p, iou) for (p, g), iou in overlap.items()}
    unmatched: Role = "appended" if answer.supervised else "missed"
    shown = list(_shown(predictions, of_prediction, ("match", "stray"), len(predictions)))
    for place in answer.match.unjudged:
        shown[place] = replace(shown[place], role="unjudged")
    return [
        *shown,
        *_shown(truths, of_truth, ("truth", unmatched), 0),
        *_shown(answer.parse.duplicates, {}, ("removed", "removed"), 0),
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
            desc=normalized(item.desc),
            kind=item.kind,
            coords=item.coords,
            iou=iou,
            pair=None if partner is None else partners_begin + partner,
            confidence=item.confidence if isinstance(item, LoggedPrediction) else None,
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


@dataclass(frozen=True)
class Gallery:
    """answers: those shown, the worst first. logged: how many there are.

    replay: the command that builds a step again, without the step; empty in an evaluation.
    """

    answers: Sequence[LoggedAnswer]
    logged: int
    resolution: int
    replay: str = ""

    def data(self) -> dict[str, Any]:
        """For the page's script."""
        cards, pictures = cards_of(self.answers, self.resolution)
        return {
            "cards": cards,
            "pictures": [asdict(picture) for picture in pictures],
            "faults": {name: [fault.label, fault.meaning] for name, fault in FAULTS.items()},
            "roles": ROLES,
            "drops": drop_meanings(),
            "logged": self.logged,
            "of_run": bool(self.replay),
            "replay": self.replay,
            "none": "No answers are logged.",
        }


def write_gallery(
    answers: Sequence[LoggedAnswer],
    out: Path,
    title: str,
    facts: Mapping[str, str],
    numbers: Mapping[str, Any] | None = None,
) -> None:
    """Write a page with these answers alone, e.g. those of an evaluation.

    facts: shown at the head, in this order, e.g. model and data. numbers: of an evaluation, as
    `scores.json` has them. At most 200 answers are shown, the worst first; the page says of how
    many.
    """
    gallery = Gallery(choose(answers), len(answers), MatchingConfig().maskiou_resolution)
    publish_page(
        out,
        "gallery.html",
        [asset("theme.js"), asset("gallery.js"), asset("sort.js")],
        {
            "title": title,
            "facts": facts,
            "gallery": gallery.data(),
            "scores": evaluation_values(numbers) if numbers else None,
        },
    )


# Rows of the table of descriptions, names of the matrix, and lines of the list of mistakes.
MOST_DESCRIPTIONS = 1000
MOST_NAMES = 12
MOST_MISTAKES = 20

MISSED, NOTHING, OTHERS = "missed", "nothing there", "all others"

# A description; None for a missed object, or for a prediction where nothing is.
Name = str | None


# Hits, mistakes, or both: all other descriptions are one row and column.
CellKind = Literal["right", "wrong", "mixed"]


@dataclass(frozen=True)
class Cell:
    """count: objects. part: of the row, 0 to 1."""

    count: int
    part: float
    kind: CellKind


@dataclass(frozen=True)
class Matrix:
    """columns: what was answered. rows: what is there, with a cell for each column."""

    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    note: str = ""


@dataclass(frozen=True)
class Mistake:
    """share: of the ground truths, or of the predictions where nothing is there."""

    truth: str
    predicted: str
    count: int
    share: str


def precision_title(protocol: str, ranked_by: str) -> str:
    """Title of a table of average precision. protocol, ranked_by: as `scores.json` has them."""
    by = "ranked by confidence" if ranked_by == "confidence" else "every detection has the score 1"
    return f"{protocol.upper()}'s average precision; {by}"


def evaluation_values(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of the numbers of `scores.json`."""
    parts, scores = numbers["breakdown"], numbers["scores"]
    truths, boxes = scores["ground_truths"], numbers["coco"]["bbox"]["objects"]
    protocol = numbers["protocol"].upper()
    # By F1, the frequent ones first where it is equal; every description has a truth or more.
    descriptions = sorted(
        parts["descriptions"], key=lambda each: (each["f1"], -each["ground_truths"])
    )
    shown = descriptions[:MOST_DESCRIPTIONS]
    return {
        "tiles": [
            Tile("F1", score(scores["f1"]), "of all objects"),
            Tile("F1@mIoU", score(scores["f1_miou"]), "mean of IoU 0.50 to 0.95"),
            Tile("Precision", score(scores["precision"]), f"of {scores['predicted']:,} predicted"),
            Tile("Recall", score(scores["recall"]), f"of {truths:,} ground truths"),
            Tile("F1 of boxes alone", score(scores["box_f1"]), "descriptions are ignored"),
            Tile("AP", score(boxes["ap"]), f"{protocol}'s, IoU 0.50 to 0.95"),
            Tile("AP50", score(boxes["ap50"]), f"{protocol}'s, IoU 0.50"),
            Tile("Duplicates", f"{scores['duplicates']:,}", "same description, IoU of 0.9 or more"),
            Tile("Oversized", f"{scores['oversized']:,}", "as large as the image, and no hit"),
        ],
        "answers": counted(numbers["answers"]["count"], "answer"),
        "iou": numbers["iou_threshold"],
        "descriptions": shown,
        "descriptions_in_all": len(descriptions),
        "matrix": _matrix(parts["confusion"]),
        "mistakes": _mistakes(parts["confusion"], descriptions),
        "thresholds": parts["thresholds"],
        "sizes": parts["sizes"],
        "precision_title": precision_title(numbers["protocol"], numbers["ranked_by"]),
        "coco": [
            ({"bbox": "boxes", "segm": "masks"}[kind] + beside, detected[part])
            for kind, detected in numbers["coco"].items()
            for part, beside in (("objects", ""), ("alone", ", descriptions ignored"))
        ],
    }


def _matrix(confusion: Sequence[dict[str, Any]]) -> Matrix | None:
    """Of the descriptions that are most frequent in it, the rest as one; None for fewer than 2."""
    often = Counter[str]()
    for each in confusion:
        for name in {each["truth"], each["predicted"]} - {None}:
            often[name] += each["count"]
    if len(often) < 2:  # one description cannot be taken for another
        return None
    names = sorted(name for name, _ in often.most_common(MOST_NAMES))
    rest = len(often) - len(names)
    places = {name: at for at, name in enumerate(names)}
    shared = [*names, *([OTHERS] if rest else [])]
    size = len(shared) + 1

    def place(name: Name) -> int:
        """Of a row or column: names, then all others, then missed or nothing."""
        return size - 1 if name is None else places.get(name, len(names))

    counts = Counter[tuple[int, int]]()
    for each in confusion:
        counts[place(each["truth"]), place(each["predicted"])] += each["count"]
    rows = []
    for row, name in enumerate([*shared, NOTHING]):
        total = max(sum(counts[row, column] for column in range(size)), 1)
        cells = [
            Cell(
                n := counts[row, column],
                n / total,
                "wrong" if row != column else "right" if row < len(names) else "mixed",
            )
            for column in range(size)
        ]
        rows.append((name, cells))
    note = f"The {len(names)} most frequent of {len(often):,} descriptions." if rest else ""
    return Matrix([*shared, MISSED], rows, note)


def _mistakes(
    confusion: Sequence[dict[str, Any]], descriptions: Sequence[dict[str, Any]]
) -> list[Mistake]:
    """Those that are made most often."""
    by_name = {each["name"]: each for each in descriptions}
    found = []
    for each in confusion:
        truth, said, count = each["truth"], each["predicted"], each["count"]
        if truth == said:
            continue
        whole = by_name[said]["predicted"] if truth is None else by_name[truth]["ground_truths"]
        found.append(Mistake(truth or NOTHING, said or MISSED, count, fraction(count, whole)))
    return found[:MOST_MISTAKES]
