"""An evaluation from a plan to a folder of artifacts (EVAL-01).

run_evaluation()   load -> push -> ask -> parse, match -> score -> folder
tables()           what a person reads of it
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from peft import load_peft_weights, set_peft_model_state_dict
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from learner.analysis.evaluation.detections import AveragePrecision, Overlap
from learner.analysis.evaluation.folder import Scored, write_evaluation
from learner.analysis.evaluation.scores import Evaluation, ScoredAnswer, Scores
from learner.analysis.report.answers import badness
from learner.analysis.report.evaluation_page import precision_title
from learner.analysis.report.run_page import error_text
from learner.config.schema import Config
from learner.data.show import new_table, plain
from learner.distributed.waiting import waiting_for
from learner.models.load import LoadedModel, load_model
from learner.operate.eval_plan import EvaluationPlan
from learner.rollout.client import RolloutClient
from learner.runs.console import score, showing_waits
from learner.training.evaluation import evaluation_facts, score_checkpoint
from shared_contracts.errors import ContractError

_WORST = 10
_OVERLAP: dict[Overlap, str] = {"bbox": "boxes", "segm": "masks"}


def run_evaluation(plan: EvaluationPlan, clients: list[RolloutClient], console: Console) -> Scored:
    """Score the answers and write the folder; clients: of the servers of the plan, if any.

    Raises:
        RunError: the servers are gone for good, or the disk is full.
    """
    disable_progress_bar()
    config = plan.config
    load = partial(_with_adapter, folder=plan.checkpoint) if plan.adapter else load_model
    with _server_folder() as folder, showing_waits(console):
        evaluation = score_checkpoint(config, plan.samples, clients, folder, plan.placement, load)
    with showing_waits(console), waiting_for("the scores"):
        return keep_evaluation(evaluation, config, plan.checkpoint, plan.data, plan.out)


def keep_evaluation(
    evaluation: Evaluation, config: Config, checkpoint: Path, data: Path, out: Path
) -> Scored:
    """Score answers to the samples of `data`, and write the folder `out`."""
    scored = Scored.of(evaluation.answers, data, polygons=config.allow_poly)
    facts = {"checkpoint": str(checkpoint), **evaluation_facts(config, data)}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_evaluation(out, scored, facts)
    return scored


@contextmanager
def _server_folder() -> Iterator[Path]:
    """Where a colocated server keeps its settings and its log, which stay when it fails."""
    folder = Path(tempfile.mkdtemp(prefix="learner-eval-"))
    try:
        yield folder
        shutil.rmtree(folder)
    finally:
        with suppress(OSError):  # gone, or not empty
            folder.rmdir()


def _with_adapter(config: Config, folder: Path) -> LoadedModel:
    """The model of the config with the adapter of a folder in the place of a new one."""
    loaded = load_model(config)
    try:
        weights = load_peft_weights(str(folder))
        result: Any = set_peft_model_state_dict(loaded.model, weights)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unfit(folder, error_text(error)) from error
    if result.unexpected_keys:
        raise _unfit(folder, f"no place for {result.unexpected_keys[0]}")
    return loaded


def _unfit(folder: Path, found: str) -> ContractError:
    return ContractError(
        "--checkpoint",
        f"the adapter in {folder} does not fit the model of the config ({found})",
        "Give the config of the run that made it, such as its resolved_config.yaml",
    )


def tables(scored: Scored) -> list[tuple[str, Table]]:
    """Scores, the categories and the samples to look at first; each with its title."""
    found = [
        (f"{len(scored.answers)} answers, a hit has an IoU of 0.5", _scores(scored)),
        ("F1 by the IoU of a hit, and objects that are faults", _places(scored.scores)),
        (precision_title(scored.files.protocol, scored.files.ranked_by), _precisions(scored)),
        (f"Descriptions of the lowest F1, at most {_WORST}", _descriptions(scored)),
    ]
    wrong = sorted((answer for answer in scored.answers if answer.f1 < 1), key=badness)
    if wrong:  # in the order of the page
        found.append((f"Samples of the lowest F1, at most {_WORST}", _samples(wrong[:_WORST])))
    return found


def _scores(scored: Scored) -> Table:
    scores = scored.scores
    table = new_table("", "#precision", "#recall", "#F1", "#hits", "#predicted", "#ground truths")
    counts = (str(scores.predicted), str(scores.ground_truths))
    by_place = (scores.box_precision, scores.box_recall, scores.box_f1)
    objects = (scores.precision, scores.recall, scores.f1)
    table.add_row("objects", *map(score, objects), str(scores.hits), *counts)
    table.add_row("descriptions ignored", *map(score, by_place), str(scores.located), *counts)
    return table


def _places(scores: Scores) -> Table:
    names = ("IoU 0.5", "IoU 0.95", "mean of 0.5 to 0.95", "duplicates", "oversized", "dropped")
    table = new_table("", *(f"#{name}" for name in names))
    f1 = (scores.f1, scores.f1_95, scores.f1_miou)
    faults = (scores.duplicates, scores.oversized, scores.dropped)
    table.add_row("objects", *map(score, f1), *map(str, faults))
    return table


def _precisions(scored: Scored) -> Table:
    names = ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large", "AR")
    table = new_table("", *(f"#{name}" for name in names))
    for kind, detected in scored.detected.items():
        table.add_row(_OVERLAP[kind], *_cells(detected.objects))
        table.add_row(f"{_OVERLAP[kind]}, descriptions ignored", *_cells(detected.alone))
    return table


def _cells(of: AveragePrecision) -> list[str]:
    values = (of.ap, of.ap50, of.ap75, of.ap_small, of.ap_medium, of.ap_large, of.ar)
    return [score(value) for value in values]


def _descriptions(scored: Scored) -> Table:
    numbers = ("precision", "recall", "F1", "F1@mIoU", "AP", "hits", "predicted", "ground truths")
    table = new_table("description", *(f"#{name}" for name in numbers))
    for found in scored.breakdown.worst(_WORST):
        scores = (found.precision, found.recall, found.f1, found.f1_miou, found.ap)
        counts = (found.hits, found.predicted, found.ground_truths)
        table.add_row(plain(found.name), *map(score, scores), *map(str, counts))
    return table


def _samples(worst: Sequence[ScoredAnswer]) -> Table:
    table = new_table("sample", "#F1", "#hits", "#predicted", "#ground truths", "#dropped", "ended")
    for answer in worst:
        numbers = (answer.hits, answer.counted, len(answer.ground_truth))
        table.add_row(
            plain(answer.sample_id),
            score(answer.f1),
            *map(str, (*numbers, len(answer.parse.dropped))),
            "by the repeat guard" if answer.repeat_terminated else answer.finish_reason or "",
        )
    return table
