"""The files of a run folder: their names, their readers, and the lock of the run that writes them.

The folder of a running run can be read: an incomplete last line is ignored. Imports no torch.
"""

import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from learner.config import Config, load_config
from learner.runs.rollout_log import ROLLOUTS, StepAnswer, logged_in
from shared_contracts.errors import ContractError

RESOLVED = "resolved_config.yaml"
METRICS = "metrics.jsonl"
RUN = "run.json"
LOCK = ".lock"
EVALUATIONS = "evaluations"
LOGS = "logs"  # output of the servers that `learner launch` starts
# Version 0.1.0 has this metric in every step, and counts steps from 0 in all but metrics.jsonl.
_OF_0_1_0 = b'"packing/post_rollout_buffer"'


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Raise ContractError if `path` is no run folder."""
        missing = [name for name in (RUN, RESOLVED) if not (path / name).is_file()]
        if missing:
            raise ContractError(
                str(path),
                f"is no run folder: it has no {' and no '.join(missing)}",
                "Name the training.output_dir of a run",
            )
        return cls(path)

    def config(self) -> Config:
        return load_config(self.path / RESOLVED)

    def facts(self) -> dict[str, Any]:
        file = self.path / RUN
        try:
            facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise _unreadable(str(file), error) from error
        return facts

    def metrics(self) -> list[dict[str, Any]]:
        """Return a line for each step and each evaluation, and one for the end of training."""
        file = self.path / METRICS
        return list(json_lines(file)) if file.is_file() else []

    def calls(self) -> list[dict[str, Any]]:
        """Return the rollout calls of all processes.

        A line has `step` or `evaluation_seed`, and `rank`, the process that wrote it.
        """
        lines = []
        for file in sorted(self.path.glob("rollout_calls*.jsonl")):
            named = re.search(r"\.rank(\d+)\.", file.name)
            rank = int(named[1]) if named else 0
            for line in json_lines(file):
                own = {"step": self.from_1(line["step"])} if "step" in line else {}
                lines.append({**line, **own, "rank": rank})
        return lines

    @cached_property
    def _from_0(self) -> frozenset[int]:
        """Steps of version 0.1.0, as its logs of answers and calls count them."""
        file = self.path / METRICS
        lines = file.read_bytes().splitlines() if file.is_file() else []
        steps = (re.search(rb'"step": (\d+)', line) for line in lines if _OF_0_1_0 in line)
        return frozenset(int(step[1]) - 1 for step in steps if step)

    def from_1(self, step: int) -> int:
        """Convert a step of a log of answers or calls to the count of metrics.jsonl."""
        return step + 1 if step in self._from_0 else step

    def answer_steps(self) -> list[int]:
        return sorted({step for step, _ in self._answer_files("step_*")})

    def answers(self, step: int) -> list[StepAnswer]:
        """Return the answers of all processes in a step, by process and sample.

        Raises ContractError for a line that is no answer.
        """
        both = (self._answer_files(f"step_{named:06d}*") for named in (step - 1, step))
        found = [item for files in both for item in files.items()]
        files = sorted((rank, file) for (of, rank), file in found if of == step)
        return [_answer(f, line | {"step": step}) for _, f in files for line in json_lines(f)]

    def _answer_files(self, pattern: str) -> dict[tuple[int, int], Path]:
        files = (self.path / ROLLOUTS).glob(pattern)
        return {
            (self.from_1(named[0]), named[1]): file
            for file in files
            if (named := logged_in(file.name)) is not None
        }


def total_steps(config: Config, last: Mapping[str, Any] | None) -> int | None:
    """Return the planned optimizer steps of a run; None while they are unknown.

    last: the newest line of a step. Epochs count as in the Trainer.
    """
    training = config.training
    if training.max_steps is not None:
        return training.max_steps
    assert training.num_train_epochs is not None, "checked with the config"
    if last is None or not last.get("epoch"):
        return None
    per_epoch: int = round(last["step"] / last["epoch"])
    return math.ceil(training.num_train_epochs * per_epoch)


def _answer(file: Path, line: dict[str, Any]) -> StepAnswer:
    try:
        return StepAnswer.model_validate(line)
    except ValidationError as error:
        raise _unreadable(str(file), error) from error


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a log, without an incomplete last line.

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
    do = "Name the folder of a whole run, written by this version (`versions` in run.json)"
    return ContractError(where, f"cannot be read ({' '.join(str(error).split())})", do)


@contextmanager
def lock_folder(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a run folder, which ends with this process: one run writes the folder.

    shared: only look; several processes may do so at once.

    Raises ContractError if a run writes the folder. File systems without locks are not protected.
    """
    with ExitStack() as opened:
        try:
            flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT  # NFS locks what it can write
            descriptor = os.open(folder / LOCK, flags, 0o666)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ContractError(
                "training.output_dir",
                f"a run writes {folder} now; {RUN} names its process",
                "Wait for that run or stop it; or name another folder",
            ) from error
        except OSError:
            pass
        yield
