"""Reads a run folder back, for the report, the replay, the live view and the simulator.

    RunFolder.open(path)   refuses what is no run folder
    .metrics()             the lines of metrics.jsonl
    .calls()               those of rollout_calls*.jsonl
    .answers(step)         those of rollouts/step_N*.jsonl

A run that is still going on may be read: a last line that is not whole yet is left out. Imports
no torch.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from learner.answer_files import ROLLOUTS, logged_in
from learner.config import Config, load_config
from learner.resume import METRICS, RESOLVED, RUN
from learner.rollout_log import StepAnswer
from shared_contracts.errors import ContractError


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, of `training.output_dir`."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Raises ContractError where `path` is no run folder."""
        missing = [name for name in (RUN, RESOLVED) if not (path / name).is_file()]
        if missing:
            raise ContractError(
                str(path),
                f"is no run folder: it has no {' and no '.join(missing)}",
                "Name the training.output_dir of a run",
            )
        return cls(path)

    def config(self) -> Config:
        """As the run understood it."""
        return load_config(self.path / RESOLVED)

    def facts(self) -> dict[str, Any]:
        """Versions, command, commit: `run.json`."""
        file = self.path / RUN
        try:
            facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise _unreadable(str(file), error) from error
        return facts

    def metrics(self) -> list[dict[str, Any]]:
        """A line for each logged step, each evaluation, and one when training has ended."""
        file = self.path / METRICS
        return list(json_lines(file)) if file.is_file() else []

    def calls(self) -> list[dict[str, Any]]:
        """What it took to get rollouts, of all processes; a line has `step`, or
        `evaluation_seed`."""
        files = sorted(self.path.glob("rollout_calls*.jsonl"))
        return [line for file in files for line in json_lines(file)]

    def calling_ranks(self) -> dict[int, set[int]]:
        """Processes that noted calls for a step, by step."""
        ranks: dict[int, set[int]] = {}
        for file in self.path.glob("rollout_calls*.jsonl"):
            for line in json_lines(file):
                if "step" in line:
                    ranks.setdefault(line["step"], set()).add(_rank_of(file))
        return ranks

    def answer_steps(self) -> list[int]:
        """Steps of channel B whose answers are logged, in order."""
        return sorted({step for step, _ in self._answer_files("step_*")})

    def answers(self, step: int) -> list[StepAnswer]:
        """Of all processes, in the order of process and sample; empty where none are logged.

        Raises ContractError for a line that is no answer.
        """
        files = self.answer_files(step).values()
        return [_answer(file, line) for file in files for line in json_lines(file)]

    def answer_files(self, step: int) -> dict[int, Path]:
        """The logs that there are of a step's answers, by the process that asked, in order."""
        found = self._answer_files(f"step_{step:06d}*").items()
        return dict(sorted((rank, file) for (of, rank), file in found if of == step))

    def _answer_files(self, pattern: str) -> dict[tuple[int, int], Path]:
        """By step and process."""
        files = (self.path / ROLLOUTS).glob(pattern)
        return {named: file for file in files if (named := logged_in(file.name)) is not None}


def total_steps(config: Config, last: Mapping[str, Any] | None) -> int | None:
    """Optimizer steps that a run is to have; None while that is not known.

    last: the newest line of a step. Epochs are counted as the Trainer does.
    """
    training = config.training
    if training.max_steps is not None:
        return training.max_steps
    assert training.num_train_epochs is not None, "checked with the config"
    if last is None or not last.get("epoch"):
        return None
    per_epoch: int = round(last["step"] / last["epoch"])
    return math.ceil(training.num_train_epochs * per_epoch)


def _rank_of(log: Path) -> int:
    """Of `rollout_calls.rank1.jsonl`."""
    match = re.search(r"\.rank(\d+)\.", log.name)
    return int(match[1]) if match else 0


def _answer(file: Path, line: dict[str, Any]) -> StepAnswer:
    try:
        return StepAnswer.model_validate(line)
    except ValidationError as error:
        raise ContractError(
            str(file),
            f"has a line that is no logged answer ({error.errors()[0]['msg']} at "
            f"{'.'.join(map(str, error.errors()[0]['loc']))})",
            "Read it with the version of Rollmatch that wrote it (`versions` in run.json)",
        ) from error


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a log; without the last line while that is being written.

    Raises ContractError for a line that is no JSON.
    """
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    for number, line in enumerate(whole.split("\n")[:-1], start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise _unreadable(f"{file}:{number}", error) from error


def _unreadable(where: str, error: ValueError) -> ContractError:
    return ContractError(where, f"is no JSON ({error})", "Name the folder of a whole run")
