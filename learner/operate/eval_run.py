"""An evaluation from a plan to a folder of artifacts (EVAL-01).

run_evaluation()   load -> push -> infer -> parse, match -> score -> folder
tables()           the results for a terminal
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from learner.analysis.evaluation.folder import Scored, write_evaluation
from learner.analysis.evaluation.scores import Evaluation
from learner.analysis.report.answers import count_table, unread_answers
from learner.analysis.report.evaluation_page import precisions, tiles
from learner.config.schema import Config
from learner.data.show import Table
from learner.distributed.waiting import waiting_for
from learner.operate.eval_plan import EvaluationPlan
from learner.rollout.client import RolloutClient
from learner.runs.console import showing_waits
from learner.training.evaluation import evaluation_facts, score_checkpoint


def run_evaluation(plan: EvaluationPlan, clients: list[RolloutClient], console: Console) -> Scored:
    """Score the answers and write the folder. clients: of the plan's servers, if any.

    Raises RunError if the servers fail for good, or the disk is full.
    """
    disable_progress_bar()
    config = plan.config
    with _server_folder() as folder, showing_waits(console):
        evaluation = score_checkpoint(config, plan.samples, clients, folder, plan.placement)
    with showing_waits(console), waiting_for("the scores"):
        return keep_evaluation(evaluation, config, plan.data, plan.out)


def keep_evaluation(evaluation: Evaluation, config: Config, data: Path, out: Path) -> Scored:
    """Score answers of `model.model` to the samples of `data`, and write the folder `out`."""
    scored = Scored.of(evaluation.answers, data, polygons=config.allow_poly)
    facts = {"checkpoint": str(config.model.model), **evaluation_facts(config, data)}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_evaluation(out, scored, facts)
    return scored


@contextmanager
def _server_folder() -> Iterator[Path]:
    """Yield a folder for settings and log of a colocated server; an error keeps the files."""
    folder = Path(tempfile.mkdtemp(prefix="learner-eval-"))
    try:
        yield folder
        shutil.rmtree(folder)
    finally:
        with suppress(OSError):  # gone, or not empty
            folder.rmdir()


def tables(scored: Scored) -> list[Table]:
    """Return the tables of scores; the page of the evaluation has more."""
    numbers = scored.numbers()
    rows = [[tile.name, tile.value, tile.note] for tile in tiles(numbers)]
    title = f"{len(scored.answers)} answers, a hit has an IoU of 0.5"
    result = [Table(title, ("", "#", ""), rows), precisions(numbers)]
    if unread := unread_answers(scored.answers):
        title = "Answers that could not be read, or only in part"
        result.append(count_table(title, "#answers", unread))
    return result
