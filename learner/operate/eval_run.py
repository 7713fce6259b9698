"""An evaluation from a plan to a folder of artifacts (EVAL-01).

run_evaluation()   load -> push -> infer -> parse, match -> score -> folder
tables()           the results for a terminal
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from learner.analysis.evaluation.folder import Scored, write_evaluation
from learner.analysis.evaluation.scores import Evaluation, ScoredAnswer
from learner.analysis.report.answers import badness, unread_answers
from learner.analysis.report.evaluation_page import descriptions, precisions, thresholds, tiles
from learner.config.schema import Config
from learner.data.show import Table
from learner.distributed.waiting import waiting_for
from learner.operate.eval_plan import EvaluationPlan
from learner.rollout.client import RolloutClient
from learner.runs.console import score, showing_waits
from learner.training.evaluation import evaluation_facts, score_checkpoint

_WORST = 10


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
    """Return tables of scores, and of the descriptions and samples with the lowest F1."""
    numbers = scored.numbers()
    rows = [[tile.name, tile.value, tile.note] for tile in tiles(numbers)]
    result = [
        Table(f"{len(scored.answers)} answers, a hit has an IoU of 0.5", ("", "#", ""), rows),
        thresholds(numbers),
        precisions(numbers),
        descriptions(numbers, _WORST, f"Descriptions of the lowest F1, at most {_WORST}"),
    ]
    if unread := unread_answers(scored.answers):
        rows = [[each.name, str(each.count), each.share, each.meaning] for each in unread]
        title = "Answers that could not be read, or only in part"
        result.append(Table(title, ("", "#answers", "#share", "meaning"), rows))
    wrong = sorted((answer for answer in scored.answers if answer.f1 < 1), key=badness)
    if wrong:  # in the order of the page
        result.append(_samples(wrong[:_WORST]))
    return result


def _samples(worst: Sequence[ScoredAnswer]) -> Table:
    rows = []
    for answer in worst:
        numbers = (answer.hits, answer.counted, len(answer.ground_truth))
        dropped = len(answer.parse.dropped)
        ended = "by the repeat guard" if answer.repeat_terminated else answer.finish_reason or ""
        rows.append(
            [answer.sample_id, score(answer.f1), *map(str, (*numbers, dropped)), ended],
        )
    title = f"Samples of the lowest F1, at most {_WORST}"
    columns = ("sample", "#F1", "#hits", "#predicted", "#ground truths", "#dropped", "ended")
    return Table(title, columns, rows)
