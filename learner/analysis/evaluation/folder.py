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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from learner.analysis.evaluation.breakdown import breakdown
from learner.analysis.evaluation.detections import (
    CocoFiles,
    Detected,
    Overlap,
    data_order,
    detect,
    precision_payload,
)
from learner.analysis.evaluation.scores import IOU_THRESHOLD, ScoredAnswer, Scores
from learner.analysis.report.evaluation_page import write_gallery
from learner.analysis.report.run_page import error_text
from learner.analysis.report.run_view import REPORT, SCORES
from learner.config.schema import Config
from learner.distributed.peers import Peers, broadcast_from_rank0
from learner.runs.atomic_files import publish_directory, publish_text, writing
from learner.runs.run_folder import EVALUATIONS
from shared_contracts.errors import ContractError, RunError

_LOG = logging.getLogger(__name__)

ANSWERS = "gt_vs_pred.jsonl"
GROUND_TRUTH = "coco_gt.json"
DETECTIONS = "coco_preds.json"


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
