"""The content of a run folder for its page: log lines, evaluations, and the head of the page."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from learner.analysis.report.page import Tile
from learner.config import Config
from learner.runs.checkpoint import step_of
from learner.runs.console import channel_of, duration, number, score
from learner.runs.run_folder import EVALUATIONS, METRICS, RunFolder, total_steps
from shared_contracts.errors import ContractError

REPORT = "report.html"
SCORES = "scores.json"

Line = dict[str, Any]
# (step, value); None for a value that is not finite.
Point = tuple[int, float | None]

_MEAN_OF = 10


@dataclass(frozen=True)
class RunView:
    """metrics: lines of metrics.jsonl. calls: lines of rollout_calls*.jsonl.

    error: the error that ended the run, if known.
    """

    folder: RunFolder
    config: Config
    facts: dict[str, Any]
    metrics: list[Line]
    calls: list[Line]
    error: str | None = None

    @classmethod
    def of(cls, folder: RunFolder, error: str | None = None) -> "RunView":
        return cls(folder, folder.config(), folder.facts(), folder.metrics(), folder.calls(), error)

    @cached_property
    def steps(self) -> list[Line]:
        return [line for line in self.metrics if "loss" in line]

    @cached_property
    def evaluations(self) -> list[Line]:
        return [line for line in self.metrics if "eval/f1" in line]

    @cached_property
    def by_channel(self) -> dict[str, list[Line]]:
        lines: dict[str, list[Line]] = {}
        for line in sorted(self.steps, key=channel_of):
            lines.setdefault(channel_of(line), []).append(line)
        return lines

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.metrics), default=0)

    @property
    def ended(self) -> Line | None:
        """The summary of a finished run; None if the run continued after it."""
        last = self.metrics[-1] if self.metrics else {}
        return last if "train_runtime" in last else None

    @property
    def replay(self) -> str:
        return f"learner replay {shlex.quote(str(self.folder.path.absolute()))}"

    def series(self, key: str) -> list[Point]:
        return points_of(self.steps, key)

    def total(self, key: str) -> int:
        return int(sum(value or 0 for _, value in self.series(key)))


def points_of(lines: Sequence[Line], key: str) -> list[Point]:
    return [(line["step"], line[key]) for line in lines if key in line]


def mean(points: Sequence[Point]) -> float | None:
    known = [value for _, value in points if value is not None]
    return sum(known) / len(known) if known else None


SCORE_NAMES = ("f1", "precision", "recall", "ap")


@dataclass(frozen=True)
class RunEvaluation:
    """An evaluation of a run.

    step: optimizer steps of the weights; 0 for the initial model.
    held_out: the data is not the training data. scores: by `SCORE_NAMES`.
    page: None if no answers were kept.
    """

    step: int
    data: Path
    held_out: bool
    scores: dict[str, float | None]
    page: Path | None

    def link(self, page: Path) -> str:
        """Return the URL of its page relative to another page; empty without a page."""
        return quote(os.path.relpath(self.page, page.parent)) if self.page else ""


def evaluations_of(run: RunView) -> list[RunEvaluation]:
    """Return all evaluations, ordered by step; those by the run itself come first, then by time.

    Raises ContractError for an unreadable `scores.json`.
    """
    folder, data = run.folder.path / EVALUATIONS, run.config.data.val_jsonl
    found = []
    for line in run.evaluations:
        assert data is not None, "a run that evaluates has data.val_jsonl"
        step, scores = int(line["step"]), {name: line.get(f"eval/{name}") for name in SCORE_NAMES}
        found.append(_evaluation(run, step, data, scores, folder / f"step_{step:06d}"))
    for file in sorted(folder.glob(f"*/{SCORES}"), key=lambda file: file.stat().st_mtime):
        if (by_eval := _of_folder(run, file)) is not None:
            found.append(by_eval)
    return sorted(found, key=lambda each: each.step)


def headline(evaluations: list[RunEvaluation], data: Path | None) -> RunEvaluation | None:
    """Return the newest evaluation of trained weights on held-out data, preferably on `data`.

    data: `data.val_jsonl`.
    """
    held_out = [each for each in evaluations if each.held_out and each.step]
    on_data = [each for each in held_out if each.data == data]
    return next(reversed(on_data or held_out), None)


def _of_folder(run: RunView, file: Path) -> RunEvaluation | None:
    """Return an evaluation by `learner eval`; None for the run's own, or for other weights."""
    try:
        numbers = json.loads(file.read_text(encoding="utf-8"))
        step = _step_of(run, Path(numbers["checkpoint"])) if "checkpoint" in numbers else None
        if step is None:
            return None
        every = {**numbers["scores"], "ap": numbers["coco"]["bbox"]["objects"]["ap"]}
        data, scores = Path(numbers["data"]), {name: every[name] for name in SCORE_NAMES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"is no {SCORES} of this version ({type(error).__name__}: {error})"
        raise ContractError(str(file), found, "Remove its folder, or evaluate again") from error
    return _evaluation(run, step, data, scores, file.parent)


def _evaluation(
    run: RunView, step: int, data: Path, scores: dict[str, float | None], folder: Path
) -> RunEvaluation:
    held_out = data.resolve() != Path(run.config.data.train_jsonl).resolve()
    page = folder / REPORT
    return RunEvaluation(step, data, held_out, scores, page if page.is_file() else None)


def _step_of(run: RunView, checkpoint: Path) -> int | None:
    """Return the step of a checkpoint; None for another run, or for discarded steps."""
    if checkpoint == run.config.model.model:
        return 0
    of_run = {run.folder.path.resolve(), Path(run.config.training.output_dir).resolve()}
    step = step_of(checkpoint) if checkpoint.parent.resolve() in of_run else None
    return step if step is not None and step <= run.last_step else None


def state(run: RunView) -> str:
    total = total_steps(run.config, run.steps[-1] if run.steps else None)
    steps = f"step {run.last_step:,}" + (f" of {total:,}" if total else "")
    if run.error is not None:
        return f"Ended by an error at {steps}."
    if run.ended is not None:
        began = int(run.facts.get("started_at_step", 0))
        last = f", the last {run.last_step - began:,} of them" if began else ""
        seconds = duration(run.ended["train_runtime"])
        return f"Finished: {run.last_step:,} steps{last} in {seconds}."
    if not run.metrics:
        return "No step is logged yet."
    written = (run.folder.path / METRICS).stat().st_mtime
    when = datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Not finished: {steps}. The last line was logged {when}."


def tiles(run: RunView, evaluation: RunEvaluation | None, link: str) -> list[Tile]:
    """Return tiles of the held-out scores and of the newest training metrics.

    evaluation: None without one. link: URL of its page, or of the advice to get one.
    """
    if evaluation is None:
        note = "this run has no evaluation; how to get one"
        result = [Tile("Held-out F1", "none yet", note, link)]
    else:
        note = f"after step {evaluation.step:,}, {evaluation.data.name}"
        result = [
            Tile("Held-out F1", score(evaluation.scores["f1"]), note, link),
            Tile("Precision", score(evaluation.scores["precision"]), "same evaluation"),
            Tile("Recall", score(evaluation.scores["recall"]), "same evaluation"),
        ]
    for name, key, format_value, of in (
        ("Match rate", "stage2_ab/channel_b/match_rate", score, ", of training images"),
        ("Loss", "loss", number, ""),
        ("Seconds a step", "time/step_s", number, ""),
    ):
        if last := run.series(key)[-_MEAN_OF:]:
            note = f"mean of the last {len(last)} steps" if len(last) > 1 else "of one step"
            result.append(Tile(name, format_value(mean(last)), note + of))
    return result
