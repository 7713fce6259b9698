"""The folder of an evaluation (EVAL-01). Imports no torch.

    coco_gt.json        ground truth, for `pycocotools.coco.COCO`
    coco_preds.json     detections, for its `loadRes`
    gt_vs_pred.jsonl    a line for each sample: the answer, its matches and its scores
    scores.json         all scores, with data and checkpoint
    report.html         the scores as tables, and the answers as pictures, the worst first

In a run folder these folders are in `evaluations`: the run itself writes `step_000120` after 120
steps, and `learner eval` writes folders with other names.
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from learner.analysis.evaluation.detections import (
    CategoryPrecision,
    CocoFiles,
    Detected,
    Overlap,
    data_order,
    detect,
    precision_payload,
)
from learner.analysis.evaluation.scores import IOU_THRESHOLD, FloatArray, ScoredAnswer, Scores
from learner.analysis.report.evaluation_page import write_gallery
from learner.analysis.report.run_page import error_text
from learner.analysis.report.run_view import REPORT, SCORES
from learner.config.schema import Config
from learner.data.coco import pixel_area
from learner.distributed.peers import Peers, broadcast_from_rank0
from learner.runs.atomic_files import publish_directory, publish_text, writing
from learner.runs.rollout_log import LoggedAnswer, LoggedObject
from learner.runs.run_folder import EVALUATIONS
from learner.stages.matching import IOU_THRESHOLDS
from learner.types import normalized
from shared_contracts.errors import ContractError, RunError

_LOG = logging.getLogger(__name__)
ANSWERS = "gt_vs_pred.jsonl"
GROUND_TRUTH = "coco_gt.json"
DETECTIONS = "coco_preds.json"
# Largest area of each size in square pixels, as in COCO.
SIZES = {"small": 32**2, "medium": 96**2, "large": inf}
Row = dict[str, Any]
NamedPair = tuple[str | None, str | None]


@dataclass(frozen=True)
class Scored:
    """All answers of an evaluation, in the order of the data file, and their scores."""

    answers: list[ScoredAnswer]
    scores: Scores
    files: CocoFiles
    detected: dict[Overlap, Detected]
    breakdown: dict[str, list[dict[str, Any]]]

    @classmethod
    def of(cls, answers: Iterable[ScoredAnswer], data: Path, *, polygons: bool) -> "Scored":
        """Score the answers. data: the file of the samples; image names start at its folder."""
        in_order = sorted(answers, key=data_order)
        files = CocoFiles.of(in_order, data.parent, polygons=polygons)
        detected = detect(files)
        parts = breakdown(in_order, detected["bbox"].categories)
        return cls(in_order, Scores.of(in_order), files, detected, parts)

    def numbers(self) -> dict[str, Any]:
        """Return the scores of `scores.json`; None without ground truth."""
        return {
            "answers": {
                "count": len(self.answers),
                "truncated": sum(answer.parse.truncated for answer in self.answers),
                "invalid": sum(answer.parse.invalid for answer in self.answers),
                "repeat_terminated": sum(answer.repeat_terminated for answer in self.answers),
            },
            "iou_threshold": IOU_THRESHOLD,
            "scores": {
                **{name: self.scores.ratio(name) for name in self.scores.fractions()},
                "hits": self.scores.hits,
                **asdict(self.scores),
            },
            "ranked_by": self.files.ranked_by,
            "protocol": self.files.protocol,
            "coco": {kind: asdict(detected) for kind, detected in self.detected.items()},
            "breakdown": self.breakdown,
        }


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
    both = predicted + ground_truths
    return {
        "hits": hits,
        "predicted": predicted,
        "ground_truths": ground_truths,
        "precision": hits / predicted if predicted else None,
        "recall": hits / ground_truths if ground_truths else None,
        "f1": 2 * hits / both if both else None,
    }


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


def write_evaluation(out: Path, scored: Scored, facts: Mapping[str, Any]) -> None:
    """Write the folder `out`, which must not exist, atomically.

    facts: data, checkpoint and settings, for `scores.json`; the page shows text values only.

    Raises RunError if the disk is full.
    """
    lines = [answer.model_dump_json() + "\n" for answer in scored.answers]
    numbers = scored.numbers()
    shown = {key: value for key, value in facts.items() if isinstance(value, str)}
    with writing(out), publish_directory(out) as part:
        publish_text(part / GROUND_TRUTH, _json(scored.files.ground_truth))
        publish_text(part / DETECTIONS, _json(scored.files.detections))
        publish_text(part / ANSWERS, "".join(lines))
        publish_text(part / SCORES, _json({**facts, **numbers}, indent=2))
        write_gallery(scored.answers, part / REPORT, shown, numbers)


def read_answers(path: Path) -> list[ScoredAnswer]:
    """Read a `gt_vs_pred.jsonl`, or that of a folder.

    Raises ContractError for a missing or invalid file.
    """
    file = path / ANSWERS if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]  # not splitlines: U+2028 in text
        return [ScoredAnswer.model_validate_json(line) for line in lines]
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ContractError(
            str(file),
            f"is no {ANSWERS} of this version ({problem})",
            "Name a folder that `learner eval` has made",
        ) from error


def finish_evaluation(
    config: Config,
    step: int,
    answers: Sequence[ScoredAnswer],
    facts: Mapping[str, Any],
    peers: Peers,
) -> dict[str, float]:
    """Return the metrics of average precision over the answers of all processes of a run.

    Every process calls it; process 0 scores the answers, and keeps them if the config says so.
    step: number of finished optimizer steps. facts: for `write_evaluation`.
    """
    parts = peers.all_gather(lambda: [answer.model_dump_json() for answer in answers])
    data = config.data.val_jsonl
    assert data is not None, "a run that evaluates has data.val_jsonl"

    def finished() -> dict[str, float]:
        gathered = [ScoredAnswer.model_validate_json(line) for part in parts for line in part]
        scored = Scored.of(gathered, data, polygons=config.allow_poly)
        if config.rollout_matching.eval_detection.save_answers:
            out = config.training.output_dir / EVALUATIONS / f"step_{step:06d}"
            _keep(out, scored, {"step": step, **facts})
        return precision_payload(scored.detected).metrics()

    return broadcast_from_rank0(peers, finished)


def _keep(out: Path, scored: Scored, facts: Mapping[str, Any]) -> None:
    """Write the evaluation folder. Raises RunError if the disk is full; else only warns."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        write_evaluation(out, scored, facts)
    except RunError:
        raise
    except Exception as problem:  # noqa: BLE001  # pages must not end a run
        reason = error_text(problem)
        _LOG.warning("the answers of the evaluation %s are not kept: %s", out, reason)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent) + "\n"
