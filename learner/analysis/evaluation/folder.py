"""The folder of an evaluation, which says all there is to say of it (EVAL-01). Imports no torch.

    coco_gt.json        ground truth, for `pycocotools.coco.COCO`
    coco_preds.json     detections, for its `loadRes`
    gt_vs_pred.jsonl    a line for each sample: the answer, its matches and its own scores
    scores.json         every number, and what it is of
    report.html         the scores as tables, and the answers as pictures, the worst first

In a run folder they are in `evaluations`: `step_000120` is what the run itself found after 120
steps, other names are of `learner eval`.
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from learner.analysis.evaluation.breakdown import Breakdown
from learner.analysis.evaluation.detections import (
    CocoFiles,
    Detected,
    Overlap,
    data_order,
    detect,
    precision_payload,
)
from learner.analysis.evaluation.scores import IOU_THRESHOLD, ScoredAnswer, Scores
from learner.analysis.report import write_gallery
from learner.analysis.report.run_page import told
from learner.analysis.report.run_view import REPORT, SCORES
from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.runs.atomic_files import publish_directory, publish_text, writing
from learner.runs.run_folder import EVALUATIONS
from shared_contracts.errors import ContractError, RunError

_LOG = logging.getLogger(__name__)

ANSWERS = "gt_vs_pred.jsonl"
GROUND_TRUTH = "coco_gt.json"
DETECTIONS = "coco_preds.json"

_UNFINISHED = ".unfinished"
_PLACES = ("box_precision", "box_recall", "box_f1")
_DERIVED = ("precision", "recall", "f1", "f1_95", "f1_miou", *_PLACES, "hits")


@dataclass(frozen=True)
class Scored:
    """All answers of an evaluation, in the order of the data file, and what they come to."""

    answers: list[ScoredAnswer]
    scores: Scores
    files: CocoFiles
    detected: dict[Overlap, Detected]
    breakdown: Breakdown

    @classmethod
    def of(cls, answers: Iterable[ScoredAnswer], data: Path, *, polygons: bool) -> "Scored":
        """data: the file of the samples; images below its folder are named from there."""
        in_order = sorted(answers, key=data_order)
        files = CocoFiles.of(in_order, data.parent, polygons=polygons)
        detected = detect(files)
        breakdown = Breakdown.of(in_order, detected["bbox"].categories)
        return cls(in_order, Scores.of(in_order), files, detected, breakdown)

    def numbers(self) -> dict[str, Any]:
        """All of them, for `scores.json`; null where there is no ground truth to measure."""
        faults = Counter[str](truncated=0, invalid=0, repeat_terminated=0)
        for answer in self.answers:
            faults["truncated"] += answer.parse.truncated
            faults["invalid"] += answer.parse.invalid
            faults["repeat_terminated"] += answer.repeat_terminated
        return {
            "answers": {"count": len(self.answers), **faults},
            "iou_threshold": IOU_THRESHOLD,
            "scores": {
                **{name: getattr(self.scores, name) for name in _DERIVED},
                **asdict(self.scores),
            },
            "ranked_by": self.files.ranked_by,
            "protocol": self.files.protocol,
            "coco": {kind: asdict(detected) for kind, detected in self.detected.items()},
            "breakdown": self.breakdown.numbers(),
        }


def write_evaluation(out: Path, scored: Scored, facts: Mapping[str, Any]) -> None:
    """Make the folder `out`, which is free; it appears whole or not at all.

    facts: what was scored, with what; they open `scores.json`, and the page shows those that are
    plain text.

    Raises RunError when the disk is full.
    """
    with writing(out), publish_directory(out) as part:
        write_files(part, scored, facts)


def write_files(folder: Path, scored: Scored, facts: Mapping[str, Any]) -> None:
    """The files of an evaluation, in a folder that is there."""
    lines = [answer.model_dump_json() + "\n" for answer in scored.answers]
    publish_text(folder / GROUND_TRUTH, _json(scored.files.ground_truth))
    publish_text(folder / DETECTIONS, _json(scored.files.detections))
    publish_text(folder / ANSWERS, "".join(lines))
    numbers = scored.numbers()
    publish_text(folder / SCORES, _json({**facts, **numbers}, indent=2))
    shown = {key: value for key, value in facts.items() if isinstance(value, str)}
    write_gallery(scored.answers, folder / REPORT, "Evaluation", shown, numbers)


def read_answers(path: Path) -> list[ScoredAnswer]:
    """The lines of `gt_vs_pred.jsonl`, or of such a file in a folder.

    Raises ContractError for a file that is not there or is something else.
    """
    file = path / ANSWERS if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]  # text may hold other line ends
        return [ScoredAnswer.model_validate_json(line) for line in lines]
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ContractError(
            str(file),
            f"is no {ANSWERS} of this version ({said})",
            "Name a folder that `learner eval` has made",
        ) from error


class EvaluationLog:
    """The evaluations of a run, of all its processes.

    Each of them leaves its answers in the run folder, which they share; process 0 scores all.

    folder: of the run. data: the file of the samples. facts: of every evaluation, for
    `write_evaluation`. save: keep the answers.
    """

    def __init__(
        self,
        folder: Path,
        data: Path,
        facts: Mapping[str, Any],
        *,
        polygons: bool,
        save: bool,
        peers: Peers = SINGLE_PROCESS,
    ) -> None:
        self._folder = folder / EVALUATIONS
        self._data = data
        self._facts = facts
        self._polygons = polygons
        self._save = save
        self._peers = peers

    def leave(self, answers: Sequence[ScoredAnswer]) -> None:
        """What this process got; before `finish` all must have done it.

        Raises RunError where it cannot be written: the others score it, too.
        """
        part = self._part(self._peers.rank)
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            publish_text(part, "".join(f"{answer.model_dump_json()}\n" for answer in answers))
        except OSError as problem:
            raise RunError(f"the answers of an evaluation cannot be shared: {problem}") from problem

    def finish(self, step: int) -> dict[str, float]:
        """Average precision of all answers, as it is logged; every process calls it.

        step: optimizer steps that were made.
        """
        return broadcast_from_rank0(self._peers, lambda: self._finished(step))

    def _finished(self, step: int) -> dict[str, float]:
        parts = [self._part(rank) for rank in range(self._peers.count)]
        answers = [answer for part in parts for answer in read_answers(part)]
        scored = Scored.of(answers, self._data, polygons=self._polygons)
        if self._save:
            self._keep(step, scored)
        shutil.rmtree(self._folder / _UNFINISHED, ignore_errors=True)
        with suppress(OSError):  # there are evaluations in it
            self._folder.rmdir()
        return precision_payload(scored.detected).metrics()

    def _keep(self, step: int, scored: Scored) -> None:
        """Raises RunError when the disk is full; else what cannot be kept is told."""
        out = self._folder / f"step_{step:06d}"
        shutil.rmtree(out, ignore_errors=True)
        try:
            write_evaluation(out, scored, {"step": step, **self._facts})
        except RunError:
            raise
        except Exception as problem:  # noqa: BLE001  # a run does not end because of its pages
            _LOG.warning("the answers of the evaluation %s are not kept: %s", out, told(problem))

    def _part(self, rank: int) -> Path:
        return self._folder / _UNFINISHED / f"rank{rank}.jsonl"


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent) + "\n"
