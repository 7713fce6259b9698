"""Where a run starts: at the beginning, or after its newest complete checkpoint (RUN-01).

    find_start()       before anything heavy is loaded: the checkpoint, if the config still fits
    prepare_folder()   truncates the logs to the checkpoint, so that each step is in them once

A resumed run has the config of `resolved_config.yaml`, except the keys that the schema marks
`FreeOnResume`: its length, what it saves and logs, and the backend. These do not change the samples
of a step or the loss. Another backend changes which answers share a pack.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from learner.config.schema import Config, LoraTuner
from learner.config.yaml12 import read_mapping
from learner.runs.atomic_files import require_folder
from learner.runs.checkpoint import (
    SavedCheckpoint,
    checkpoints_in,
    clear_unfinished,
    newest_checkpoint,
)
from learner.runs.rollout_log import ROLLOUTS, logged_in
from learner.runs.run_folder import EVALUATIONS, METRICS, RESOLVED, RunFolder, lock_folder
from shared_contracts.errors import CheckErrors, ContractError, ContractErrors
from shared_contracts.strict_model import FREE_ON_RESUME


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    checkpoint: None at the beginning.
    goes_on: with `resume: auto`; the folder may have files of an earlier attempt.
    notes: messages for the terminal.
    """

    checkpoint: SavedCheckpoint | None = None
    goes_on: bool = False
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.checkpoint.manifest.step if self.checkpoint else 0

    @property
    def folder(self) -> str | None:
        """The folder of the checkpoint."""
        return str(self.checkpoint.path) if self.checkpoint else None

    def state(self, rank: int, processes: int) -> dict[str, Any]:
        """Return the state of process `rank` in the checkpoint; empty if it has none."""
        if self.checkpoint is None or self.checkpoint.manifest.processes != processes:
            return {}
        return self.checkpoint.manifest.states[rank]

    def tuned(self, config: Config) -> Config:
        """Return the config; with `train_coordinate_rows` false instead of auto if the adapter
        of the checkpoint trains no rows, as those of version 0.1.0.
        """
        file = self.checkpoint.path / "adapter_config.json" if self.checkpoint else None
        if not (isinstance(config.tuner, LoraTuner) and file is not None and file.is_file()):
            return config
        rows = json.loads(file.read_text(encoding="utf-8")).get("trainable_token_indices")
        if rows or config.tuner.train_coordinate_rows != "auto":
            return config
        tuner = config.tuner.model_copy(update={"train_coordinate_rows": False})
        return config.model_copy(update={"tuner": tuner})

    @property
    def weights_version(self) -> int:
        return self.checkpoint.manifest.weights_version if self.checkpoint else 0


BEGINNING = Start()


def find_start(config: Config, processes: int) -> Start:
    """Return where a run of `processes` processes starts, by `training.resume`.

    Raises ContractError if the folder has another run, if a run writes it, if its newest
    checkpoint is not complete, or if this config cannot resume its run.
    """
    folder = config.training.output_dir
    require_run_folder(config)
    if folder.is_dir():
        with lock_folder(folder, shared=True):
            pass
    if config.training.resume == "never":
        if (folder / METRICS).exists() or checkpoints_in(folder):
            raise ContractError(
                "training.output_dir",
                f"{folder} holds another run",
                "Name a new folder or move the old run away; to go on with that run, set "
                "training.resume to auto",
            )
        return BEGINNING
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        if not (folder / METRICS).exists():
            return Start(None, True)
        _require_same_config(config, folder)
        note = f"No checkpoint in {folder} yet: this run starts anew, and its logs with it"
        return Start(None, True, (note,))
    _require_same_run(config, checkpoint)
    _require_states(checkpoint, processes)
    notes = [f"Going on from {checkpoint.path}"]
    if checkpoint.manifest.processes != processes:
        notes.append(
            f"Warning: {checkpoint.manifest.processes} processes made it and {processes} go on: "
            "the steps have the same samples, but random numbers and seeds of answers differ"
        )
    return Start(checkpoint, True, tuple(notes))


def require_run_folder(config: Config) -> None:
    """Raise ContractErrors unless this process can write the run folder and its files."""
    training = config.training
    found = CheckErrors()
    found.of(lambda: require_folder("training.output_dir", training.output_dir))
    found.of(lambda: require_folder("training.logging_dir", training.logging_dir))
    if not found.errors:
        found.errors += _unwritable_parts(training.output_dir)
    found.raise_all()


def _unwritable_parts(folder: Path) -> Iterator[ContractError]:
    """Yield an error for each file that a resumed run would change and cannot."""
    for path in (folder / METRICS, folder / ROLLOUTS, *checkpoints_in(folder)):
        if path.exists() and not os.access(path, os.W_OK):
            do = "Give this user the right to write it, or name another folder"
            yield ContractError("training.output_dir", f"{path} is not writable", do)


def prepare_folder(folder: Path, start: Start) -> None:
    """Bring the run folder, which this process has locked, back to its state at `start`.

    Raises ContractError if another run has written it since `find_start`.
    """
    newest = next(map(str, checkpoints_in(folder)), None)
    if newest != start.folder or ((folder / METRICS).exists() and not start.goes_on):
        found = f"another run has written {folder} while this one was starting"
        raise ContractError("training.output_dir", found, "Start the same command again")
    clear_unfinished(folder)
    truncate_logs(folder, start.checkpoint.manifest.logs if start.checkpoint else {}, start.step)


def data_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_states(checkpoint: SavedCheckpoint, processes: int) -> None:
    """Raise ContractError if the checkpoint has states of another number of processes."""
    made = checkpoint.manifest.processes
    if made != processes and any(checkpoint.manifest.states):
        raise ContractError(
            "training.resume",
            f"auto, and {checkpoint.path} has the states of {made} processes, and there are "
            f"{processes} now",
            f"Launch {made} processes, or start a new run in another folder",
        )


def _require_same_run(config: Config, checkpoint: SavedCheckpoint) -> None:
    _require_same_config(config, checkpoint.path.parent)
    digest = data_digest(config.data.train_jsonl)
    if digest != checkpoint.manifest.data_sha256:
        raise ContractError(
            "data.train_jsonl",
            f"{config.data.train_jsonl} is no longer the file that {checkpoint.path} was "
            "trained on",
            "Restore the file, or start a new run in another folder",
        )


def _require_same_config(config: Config, folder: Path) -> None:
    resolved, errors = folder / RESOLVED, list[ContractError]()
    do = "Set it back; or start a new run in another folder, with a checkpoint as model.model"
    for key, old, new in _differences(read_mapping(resolved), config):
        found = f"is {new!r}, and {resolved} has {old!r}: a resumed run must have the same value"
        errors.append(ContractError(key, found, do))
    if errors:
        raise ContractErrors(errors)


def _differences(
    before: dict[str, Any], section: BaseModel, at: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted keys that differ and are not `FreeOnResume`, with the old and the new value.

    before: the mapping that `dump_resolved` wrote; keys that it lacks are skipped.
    """
    now = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        if name not in before or FREE_ON_RESUME in field.metadata:
            continue
        old, value = before[name], getattr(section, name)
        if isinstance(old, dict) and isinstance(value, BaseModel):
            yield from _differences(old, value, f"{at}{name}.")
        elif old != now[name]:
            yield f"{at}{name}", old, now[name]


_CUT_LOGS = ("metrics.jsonl", "rollout_calls*.jsonl")
_EVALUATION = re.compile(r"step_(\d+)(\.part)?")


def log_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each log of a run folder, by name."""
    return {path.name: path.stat().st_size for path in _logs(folder)}


def truncate_logs(folder: Path, sizes: dict[str, int], step: int) -> None:
    """Truncate each log to its size, and remove logs, rollouts and evaluations of later steps.

    sizes: `log_sizes` after step `step`. Idempotent.
    """
    run = RunFolder(folder)
    for path in (folder / ROLLOUTS).glob("step_*"):
        logged = logged_in(path.name.removesuffix(".part"))
        if logged is not None and run.from_1(logged[0]) > step:
            path.unlink()
    for path in _logs(folder):
        if path.name not in sizes:
            path.unlink()
        elif path.stat().st_size > sizes[path.name]:
            os.truncate(path, sizes[path.name])
    for path in (folder / EVALUATIONS).glob("step_*"):
        after = _EVALUATION.fullmatch(path.name)
        if after is not None and int(after[1]) > step:
            shutil.rmtree(path)


def _logs(folder: Path) -> list[Path]:
    return sorted(path for pattern in _CUT_LOGS for path in folder.glob(pattern))
