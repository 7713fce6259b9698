"""The files of a run folder: their names, what reads them back, and which process writes them.

    RunFolder.open(path)     refuses what is no run folder
    .metrics()               the lines of metrics.jsonl
    .calls()                 those of rollout_calls*.jsonl
    .answers(step)           those of rollouts/step_N*.jsonl
    identity_of_this_process(), is_alive()    of the process that writes the folder, in run.json

A run that is still going on may be read: a last line that is not whole yet is left out. Imports
no torch.
"""

import json
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
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
EVALUATIONS = "evaluations"
LOGS = "logs"  # what the servers say that `learner launch` started
# Version 0.1.0 has this metric in every step, and counts steps from 0 in all but metrics.jsonl.
_OF_0_1_0 = b'"packing/post_rollout_buffer"'


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
        """What it took to get rollouts, of all processes.

        A line has `step`, or `evaluation_seed`; and `rank`, the process that wrote it.
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
        """Steps that 0.1.0 has made, as it counts them in the logs of answers and of calls."""
        file = self.path / METRICS
        lines = file.read_bytes().splitlines() if file.is_file() else []
        steps = (re.search(rb'"step": (\d+)', line) for line in lines if _OF_0_1_0 in line)
        return frozenset(int(step[1]) - 1 for step in steps if step)

    def from_1(self, step: int) -> int:
        """A step of a log of answers or calls, as metrics.jsonl counts it."""
        return step + 1 if step in self._from_0 else step

    def answer_steps(self) -> list[int]:
        """Steps of channel B whose answers are logged, in order."""
        return sorted({step for step, _ in self._answer_files("step_*")})

    def answers(self, step: int) -> list[StepAnswer]:
        """Of all processes, in the order of process and sample; empty where none are logged.

        Raises ContractError for a line that is no answer.
        """
        both = (self._answer_files(f"step_{named:06d}*") for named in (step - 1, step))
        found = [item for files in both for item in files.items()]
        files = sorted((rank, file) for (of, rank), file in found if of == step)
        return [_answer(f, line | {"step": step}) for _, f in files for line in json_lines(f)]

    def _answer_files(self, pattern: str) -> dict[tuple[int, int], Path]:
        """By step and process."""
        files = (self.path / ROLLOUTS).glob(pattern)
        return {
            (self.from_1(named[0]), named[1]): file
            for file in files
            if (named := logged_in(file.name)) is not None
        }


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


_PROC = Path("/proc")


def identity_of_this_process() -> dict[str, Any]:
    """Host, pid and start of this process, and where the pid is valid."""
    return {
        "host": socket.gethostname(),
        **_pid_space(),
        "pid": os.getpid(),
        "start_ticks": _start_ticks(os.getpid()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def is_alive(identity: dict[str, Any]) -> bool:
    """False for a process that cannot be seen from here: of another container, or another boot."""
    here = _pid_space()
    seen = bool(here) and here.items() <= identity.items()
    return bool(seen and _start_ticks(identity["pid"]) == identity["start_ticks"])


def _pid_space() -> dict[str, str]:
    """The namespace of pids and the boot of the machine; empty where /proc does not have them.

    The first namespace of every machine has the same number.
    """
    try:
        return {
            "boot_id": (_PROC / "sys/kernel/random/boot_id").read_text().strip(),
            "pid_namespace": str((_PROC / "self/ns/pid").readlink()),
        }
    except OSError:
        return {}


def _start_ticks(pid: int) -> int | None:
    """When it was started, after the start of the machine; None where there is none, or a zombie.

    A pid that another process has by now has another start.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before may have spaces
    return None if state == "Z" else int(fields[18])
