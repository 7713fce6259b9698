"""`report.html` of an evaluation: tables of scores, and pictures of answers.

`learner eval` prints the tiles and the average precision.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from learner.analysis.report.answers import Finding, sample_answers, unread_answers
from learner.analysis.report.gallery import gallery
from learner.analysis.report.page import Section, Tile, asset, publish_page
from learner.config.rollout_matching import MatchingConfig
from learner.data.show import Table
from learner.runs.console import counted, fraction, score
from learner.runs.rollout_log import LoggedAnswer

# Largest numbers of rows of the tables.
MOST_DESCRIPTIONS = 1000
MOST_MISTAKES = 20

Numbers = Mapping[str, Any]


def write_gallery(
    answers: Sequence[LoggedAnswer], out: Path, facts: Mapping[str, str], numbers: Numbers
) -> None:
    """Write a page with at most 200 of the answers, selected by `sample_answers`.

    facts: shown at the head, in this order. numbers: the content of `scores.json`.
    """
    resolution = MatchingConfig().maskiou_resolution
    values = {
        "title": "Evaluation",
        "state": _state(numbers),
        "finished": False,
        "tiles": tiles(numbers),
        "findings": [
            Finding("bad", f"{each.count} answers with {each.meaning} ({each.name})", "gallery")
            for each in unread_answers(answers)
        ],
        "facts": facts,
        "sections": list(_sections(numbers)),
        "plots": {},
        "gallery": gallery(sample_answers(answers), len(answers), resolution),
        "texts": {},
    }
    publish_page(out, [asset("gallery.js"), asset("sort.js")], values)


def _state(numbers: Numbers) -> str:
    answers = counted(numbers["answers"]["count"], "answer")
    least = numbers["iou_threshold"]
    return f"{answers}; a hit has an IoU of at least {least} and the right description."


def tiles(numbers: Numbers) -> list[Tile]:
    scores, boxes = numbers["scores"], numbers["coco"]["bbox"]["objects"]
    protocol = numbers["protocol"].upper()
    return [
        Tile("F1", score(scores["f1"]), "of all objects"),
        Tile("F1@mIoU", score(scores["f1_miou"]), "mean of IoU 0.50 to 0.95"),
        Tile("Precision", score(scores["precision"]), f"of {scores['predicted']:,} predicted"),
        Tile("Recall", score(scores["recall"]), f"of {scores['ground_truths']:,} ground truths"),
        Tile("F1 of boxes alone", score(scores["box_f1"]), "descriptions are ignored"),
        Tile("AP", score(boxes["ap"]), f"{protocol}'s, IoU 0.50 to 0.95"),
        Tile("AP50", score(boxes["ap50"]), f"{protocol}'s, IoU 0.50"),
        Tile("Duplicates", f"{scores['duplicates']:,}", "same description, IoU of 0.9 or more"),
        Tile("Oversized", f"{scores['oversized']:,}", "as large as the image, and no hit"),
    ]


_SCORES = ("f1", "precision", "recall")
_COUNTS = ("hits", "predicted", "ground_truths")
_OF_DESCRIPTION = ("f1_miou", "f1_95", "ap", "ap50")
_OF_DETECTIONS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar")


def _sections(numbers: Numbers) -> Iterator[Section]:
    parts = numbers["breakdown"]
    table, count = _descriptions(numbers, MOST_DESCRIPTIONS), len(parts["descriptions"])
    lead = f"{len(table.rows):,} of {count:,} descriptions, the lowest F1 first. "
    lead += "Choose a column to sort by it. `scores.json` has all descriptions."
    if not count:
        lead = "Nothing is annotated, and nothing was predicted."
    yield Section("descriptions", "Descriptions", lead, tables=[table] if count else [])
    yield _mistakes(parts["confusion"], {each["name"]: each for each in parts["descriptions"]})
    sizes = "By size: areas up to 32², up to 96² and above, in pixels"
    tables = [
        _table("By the IoU that a hit needs", parts["thresholds"], "iou", _SCORES, ["hits"]),
        _table(sizes, parts["sizes"], "size", _SCORES, _COUNTS),
        precisions(numbers),
    ]
    yield Section("thresholds", "IoU and size", tables=tables)


def _descriptions(numbers: Numbers, most: int) -> Table:
    """Return a table of at most `most` descriptions: lowest F1 first, then the most frequent."""
    every = numbers["breakdown"]["descriptions"]
    by_f1 = sorted(every, key=lambda each: (each["f1"], -each["ground_truths"]))
    scores = (*_SCORES, *_OF_DESCRIPTION)
    return _table("", by_f1[:most], "name", scores, _COUNTS, sortable=True)


def precisions(numbers: Numbers) -> Table:
    rows = [
        {"what": {"bbox": "boxes", "segm": "masks"}[kind] + beside, **detected[part]}
        for kind, detected in numbers["coco"].items()
        for part, beside in (("objects", ""), ("alone", ", descriptions ignored"))
    ]
    ranked = numbers["ranked_by"] == "confidence"
    by = "ranked by confidence" if ranked else "every detection has the score 1"
    title = f"{numbers['protocol'].upper()}'s average precision; {by}"
    return _table(title, rows, "what", _OF_DETECTIONS, [])


def _table(
    title: str,
    rows: Sequence[Numbers],
    name: str,
    scores: Sequence[str],
    counts: Sequence[str],
    *,
    sortable: bool = False,
) -> Table:
    """Return a table with the keys `name`, `scores` and `counts` of each row."""
    heads = [f"#{key.replace('_', ' ')}" for key in (*scores, *counts)]
    cells = [
        [
            str(row[name]),
            *(score(row[key]) for key in scores),
            *(f"{row[key]:,}" for key in counts),
        ]
        for row in rows
    ]
    return Table(title, [name, *heads], cells, sortable)


def _mistakes(confusion: Sequence[Numbers], descriptions: Mapping[str, Numbers]) -> Section:
    rows = []
    for each in confusion:
        truth, predicted, count = each["truth"], each["predicted"], each["count"]
        if truth == predicted:
            continue
        if truth is None:
            share = fraction(count, descriptions[predicted]["predicted"])
        else:
            share = fraction(count, descriptions[truth]["ground_truths"])
        rows.append([truth or "nothing", predicted or "missed", f"{count:,}", share])
    lead = "The share is of the annotated objects; for false positives, of the predictions."
    if not rows:
        lead = "There are no missed objects, false positives or wrong descriptions."
    table = Table("", ["there", "answered", "#objects", "#share"], rows[:MOST_MISTAKES])
    title = "Most frequent mistakes"
    return Section("confusion", title, lead, tables=[table] if rows else [])
