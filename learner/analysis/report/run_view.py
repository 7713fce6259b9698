"""A run folder as the page shows it: its lines, its evaluations, and the head of the page."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from learner.config import Config
from learner.runs.checkpoint import checkpoints_in
from learner.runs.console import channel_of, duration, number, score
from learner.runs.run_folder import EVALUATIONS, METRICS, RESOLVED, RunFolder, total_steps
from shared_contracts.errors import ContractError

Line = dict[str, Any]
# (step, value); the value is None where it was not a number.
Point = tuple[int, float | None]


@dataclass(frozen=True)
class RunView:
    """metrics: lines of metrics.jsonl. calls: those of rollout_calls*.jsonl.

    error: what ended the run, where that is known.
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
        """A line for each optimizer step that was logged."""
        return [line for line in self.metrics if "loss" in line]

    @cached_property
    def evaluations(self) -> list[Line]:
        return [line for line in self.metrics if "eval/f1" in line]

    @property
    def channels(self) -> str:
        """Which channels it has run: `A`, `B`, `AB`, or nothing yet."""
        ran = {bool(line.get("step/channel_b")) for line in self.steps}
        return ("A" if False in ran else "") + ("B" if True in ran else "")

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.metrics), default=0)

    @property
    def ended(self) -> Line | None:
        """The line that says that training has ended, unless it went on since."""
        last = self.metrics[-1] if self.metrics else {}
        return last if "train_runtime" in last else None

    @property
    def total_steps(self) -> int | None:
        """How many it is to have; None where that cannot be told yet."""
        if self.ended is not None:
            return self.last_step
        return total_steps(self.config, self.steps[-1] if self.steps else None)

    @property
    def replay(self) -> str:
        """The command that builds a step again, without the step."""
        return f"learner replay {shlex.quote(str(self.folder.path.absolute()))}"

    def series(self, key: str, channel: str = "AB") -> list[Point]:
        """The values of a metric in the steps that have it."""
        return points(of_channel(self.steps, channel), key)

    def mean_of_last(self, key: str, count: int = 10) -> float | None:
        values = [value for _, value in self.series(key)[-count:] if value is not None]
        return sum(values) / len(values) if values else None


def points(lines: Sequence[Line], key: str) -> list[Point]:
    return [(line["step"], line[key]) for line in lines if key in line]


def of_channel(lines: Sequence[Line], channel: str) -> list[Line]:
    return [line for line in lines if channel_of(line) in channel]


def keys_below(lines: Sequence[Line], prefix: str) -> list[str]:
    """Keys that begin with `prefix`, in the order in which they appear."""
    return list(dict.fromkeys(key for line in lines for key in line if key.startswith(prefix)))


def numbers(points: Sequence[Point]) -> Iterator[float]:
    return (value for _, value in points if value is not None)


REPORT = "report.html"
SCORES = "scores.json"

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class RunEvaluation:
    """An evaluation of a run.

    step: optimizer steps that the weights had made; 0 for the model that the run began with.
    held_out: not on the samples that the run trains on. page: None where no answers were kept.
    written: seconds since 1970; 0 of the run's own.
    """

    step: int
    data: Path
    held_out: bool
    f1: float | None
    precision: float | None
    recall: float | None
    ap: float | None
    page: Path | None
    written: float = 0.0

    def link(self, page: Path) -> str:
        """A relative URL of its page for the page `page`; empty where it has none."""
        return quote(os.path.relpath(self.page, page.parent)) if self.page else ""


def evaluations_of(run: RunView) -> list[RunEvaluation]:
    """In the order of their steps, of one step in the order in which they were made.

    Raises ContractError where a `scores.json` cannot be read.
    """
    files = sorted((run.folder.path / EVALUATIONS).glob(f"*/{SCORES}"))
    made = [found for file in files if (found := _of_folder(run, file))]
    own = [_of_line(run, line) for line in run.evaluations]
    return sorted([*own, *made], key=lambda found: (found.step, found.written))


def headline(evaluations: list[RunEvaluation], data: Path | None) -> RunEvaluation | None:
    """The newest one of trained weights on held-out data: on `data.val_jsonl` where there is one.

    data: `data.val_jsonl`.
    """
    held_out = [found for found in evaluations if found.held_out and found.step]
    of_the_run = [found for found in held_out if found.data == data]
    return next(reversed(of_the_run or held_out), None)


def how_to_evaluate(run: RunView) -> str:
    """The command that scores the newest checkpoint."""
    folder = run.folder.path.absolute()
    checkpoints = checkpoints_in(folder)
    checkpoint = shlex.quote(str(checkpoints[0])) if checkpoints else f"{folder}/checkpoint-N"
    data = "" if run.config.data.val_jsonl else " --data FILE"
    config = shlex.quote(str(folder / RESOLVED))
    return f"learner eval --config {config} --checkpoint {checkpoint}{data}"


def _of_line(run: RunView, line: Line) -> RunEvaluation:
    """Of the run itself, on `data.val_jsonl`."""
    step = int(line["step"])
    data = run.config.data.val_jsonl
    assert data is not None, "a run that evaluates has it"
    page = run.folder.path / EVALUATIONS / f"step_{step:06d}" / REPORT
    return RunEvaluation(
        step,
        data,
        _held_out(run, data),
        f1=line["eval/f1"],
        precision=line.get("eval/precision"),
        recall=line.get("eval/recall"),
        ap=line.get("eval/ap"),
        page=page if page.is_file() else None,
    )


def _of_folder(run: RunView, file: Path) -> RunEvaluation | None:
    """Of `learner eval`; None for a folder of the run itself, or of weights it has not made."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        step = _step_of(run, Path(told["checkpoint"])) if "checkpoint" in told else None
        if step is None:
            return None
        scores = {name: told["scores"][name] for name in ("f1", "precision", "recall")}
        data, ap = Path(told["data"]), told["coco"]["bbox"]["objects"]["ap"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"is no {SCORES} of this version ({type(error).__name__}: {error})"
        raise ContractError(str(file), found, "Remove its folder, or evaluate again") from error
    page = file.with_name(REPORT)
    return RunEvaluation(
        step,
        data,
        _held_out(run, data),
        **scores,
        ap=ap,
        page=page if page.is_file() else None,
        written=file.stat().st_mtime,
    )


def _step_of(run: RunView, checkpoint: Path) -> int | None:
    """None for weights that are not of the run, or of steps that it has thrown away since."""
    if checkpoint == run.config.model.model:
        return 0
    named = _CHECKPOINT.fullmatch(checkpoint.name)
    of_run = {run.folder.path.resolve(), Path(run.config.training.output_dir).resolve()}
    if named is None or checkpoint.parent.resolve() not in of_run:
        return None
    step = int(named[1])
    return step if step <= run.last_step else None


def _held_out(run: RunView, data: Path) -> bool:
    return data.resolve() != Path(run.config.data.train_jsonl).resolve()


@dataclass(frozen=True)
class Tile:
    """A number worth large letters. note: what it is the mean of, and the like.

    link: where more of it is; empty where that is nowhere.
    """

    name: str
    value: str
    note: str = ""
    link: str = ""


def state(run: RunView) -> str:
    """One sentence."""
    total = run.total_steps
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
    """The run's headline, which is the F1 of an evaluation, then what else is known.

    evaluation: None where the run has none. link: of its page, or of how to get one.
    """
    if evaluation is None:
        note = "this run has no evaluation; how to get one"
        found = [Tile("Held-out F1", "none yet", note, link)]
    else:
        note = f"after step {evaluation.step:,}, {evaluation.data.name}"
        found = [
            Tile("Held-out F1", score(evaluation.f1), note, link),
            Tile("Precision", score(evaluation.precision), "same evaluation"),
            Tile("Recall", score(evaluation.recall), "same evaluation"),
        ]
    match_rate = "stage2_ab/channel_b/match_rate"
    if series := run.series(match_rate):
        note = f"of training images, {_of_last(series)} with answers"
        found.append(Tile("Match rate", score(run.mean_of_last(match_rate)), note))
    if series := run.series("loss"):
        note = _of_last(series)
        found.append(Tile("Loss", number(run.mean_of_last("loss")), note))
    if series := run.series("time/step_s"):
        value = number(run.mean_of_last("time/step_s"))
        found.append(Tile("Seconds a step", value, _of_last(series)))
    return found


def _of_last(series: Sequence[Point]) -> str:
    count = min(10, len(series))
    return f"mean of the last {count} steps" if count > 1 else "of one step"


def facts(run: RunView) -> dict[str, str]:
    """What the run is."""
    config, known = run.config, run.facts
    versions: dict[str, Any] = known.get("versions", {})
    rollouts, kind = known.get("rollouts"), config.tuner.train_type
    shown = {
        "variant": f"{config.custom.trainer_variant}, channel B in {config.b_ratio:%} of the steps",
        "model": str(config.model.model),
        "trained": {"full": "all weights"}.get(kind, kind),
        "answers by": f"{known.get('rollout_backend')}: {rollouts}" if rollouts else "",
        "weights travel": known.get("sync_mode") or "",
        "data": str(config.data.train_jsonl),
        "batch": f"{config.training.effective_batch_size} samples a step",
        "commit": (known.get("commit") or "")[:12],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "python": str(known.get("python", "")),
    }
    return {name: value for name, value in shown.items() if value}
