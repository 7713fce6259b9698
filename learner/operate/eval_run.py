"""An evaluation from a plan to a folder of artifacts (EVAL-01)."""

import shutil
import tempfile
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from learner.analysis.evaluation.folder import Scored, write_evaluation
from learner.analysis.report.answers import count_table, unread_answers
from learner.analysis.report.evaluation_page import precisions, tiles
from learner.data.show import Table
from learner.distributed.waiting import reporting_waits, waiting_for
from learner.operate.eval_plan import EvaluationPlan
from learner.rollout.client import RolloutClient
from learner.runs.console import tell
from learner.training.evaluation import evaluation_facts, score_checkpoint


def run_evaluation(plan: EvaluationPlan, clients: list[RolloutClient], console: Console) -> Scored:
    """Score the answers and write the folder. clients: of the plan's servers, if any.

    An error keeps the folder with settings and log of a colocated server.

    Raises RunError if the servers fail for good, or the disk is full.
    """
    disable_progress_bar()
    config, placement = plan.config, plan.placement
    folder = Path(tempfile.mkdtemp(prefix="learner-eval-")) if placement is not None else None
    with reporting_waits(partial(tell, console)):
        evaluation = score_checkpoint(config, plan.samples, clients, folder, placement)
        if folder is not None:
            shutil.rmtree(folder)
        with waiting_for("the scores"):
            scored = Scored.of(evaluation.answers, plan.data, polygons=config.allow_poly)
            facts = {"checkpoint": str(config.model.model), **evaluation_facts(config, plan.data)}
            plan.out.parent.mkdir(parents=True, exist_ok=True)
            write_evaluation(plan.out, scored, facts)
    return scored


def tables(scored: Scored) -> list[Table]:
    numbers = scored.numbers()
    rows = [[tile.name, tile.value, tile.note] for tile in tiles(numbers)]
    title = f"{len(scored.answers)} answers, a hit has an IoU of 0.5"
    result = [Table(title, ("", "#", ""), rows), precisions(numbers)]
    if unread := unread_answers(scored.answers):
        title = "Answers that could not be read, or only in part"
        result.append(count_table(title, "#answers", unread))
    return result
