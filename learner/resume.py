"""Where a run starts: at the beginning, or behind its newest whole checkpoint (RUN-01).

    find_start()       before anything heavy is loaded: the checkpoint, if the config still fits
    prepare_folder()   leftovers away, logs cut back to it

A run goes on only as the run it was: whatever the samples of a step, the weights or the loss
depend on must be as in `resolved_config.yaml`. How long it runs, what it saves and shows, and
where answers come from may change; the last also changes how answers are grouped into packs.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.checkpoint import (
    Checkpoint,
    checkpoints_in,
    clear_unfinished,
    newest_whole,
    set_broken_aside,
)
from learner.config.schema import Config
from learner.config.yaml12 import read_mapping
from learner.log_cut import cut_back
from learner.process_mark import lives
from shared_contracts.errors import ContractError, ContractErrors

RESOLVED = "resolved_config.yaml"
METRICS = "metrics.jsonl"
RUN = "run.json"

# Keys, or all keys below one, that may be otherwise in a run that goes on.
FREE = (
    "custom.extra",
    "data.val_jsonl",
    "model.attn_implementation",
    "model.gradient_checkpointing",
    "rollout_matching.decode_batch_size",
    "rollout_matching.eval_detection",
    "rollout_matching.offload",
    "rollout_matching.rollout_backend",
    "rollout_matching.vllm",
    "training.eval_steps",
    "training.eval_strategy",
    "training.gradient_accumulation_steps",
    "training.log_rollouts",
    "training.logging_dir",
    "training.max_steps",
    "training.num_train_epochs",
    "training.output_dir",
    "training.packing_min_fill_ratio",
    "training.per_device_eval_batch_size",
    "training.per_device_train_batch_size",
    "training.report_to",
    "training.resume",
    "training.run_name",
    "training.save_steps",
    "training.save_strategy",
    "training.save_total_limit",
)


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    checkpoint: None at the beginning.
    goes_on: in a folder that may hold what an earlier attempt has left.
    notes: what whoever started it should know.
    """

    checkpoint: Checkpoint | None = None
    goes_on: bool = False
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.checkpoint.manifest.step if self.checkpoint else 0

    @property
    def folder(self) -> str | None:
        """Of the checkpoint."""
        return str(self.checkpoint.path) if self.checkpoint else None

    def state(self, rank: int, processes: int) -> dict[str, Any]:
        """What process `rank` added to the checkpoint; empty where it added nothing."""
        if self.checkpoint is None or self.checkpoint.manifest.processes != processes:
            return {}
        return self.checkpoint.manifest.states[rank]

    @property
    def weights_version(self) -> int:
        return self.checkpoint.manifest.weights_version if self.checkpoint else 0


BEGINNING = Start()


def find_start(config: Config, processes: int) -> Start:
    """Where a run of `processes` processes starts, as `training.resume` says.

    Raises:
        ContractError: the folder holds another run, or one that still goes on; or the same run,
            which cannot go on with this config.
    """
    folder = config.training.output_dir
    _require_no_writer(folder)
    if config.training.resume == "never":
        _require_unused(folder)
        return BEGINNING
    checkpoint, broken = newest_whole(folder)
    if checkpoint is None:
        if broken:
            raise ContractError(
                "training.output_dir",
                f"no checkpoint in {folder} is whole ({'; '.join(map(str, broken))})",
                "Restore one, or move the folder away to start anew",
            )
        if not (folder / METRICS).exists():
            return Start(None, True)
        _require_same_config(config, folder)
        note = f"No checkpoint in {folder} yet: this run starts anew, and its logs with it"
        return Start(None, True, (note,))
    _require_same_run(config, checkpoint)
    _require_states(checkpoint, processes)
    notes = [f"Warning: {error}; it is set aside" for error in broken]
    notes.append(f"Going on from {checkpoint.path}")
    if checkpoint.manifest.processes != processes:
        notes.append(
            f"Warning: {checkpoint.manifest.processes} processes made it and {processes} go on: "
            "the steps have the same samples, but random numbers and seeds of answers differ"
        )
    return Start(checkpoint, True, tuple(notes))


def prepare_folder(folder: Path, start: Start) -> None:
    """Bring the run folder to what it was when the run was at `start`."""
    clear_unfinished(folder)
    if start.checkpoint is not None:
        set_broken_aside(folder, start.checkpoint)
        cut_back(folder, start.checkpoint.manifest.logs, start.step)
    else:
        cut_back(folder, {}, 0)


def data_digest(path: Path) -> str:
    """SHA-256 of a file of samples, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_no_writer(folder: Path) -> None:
    """No other process writes the folder, as far as can be seen from here."""
    try:
        mark = json.loads((folder / RUN).read_text(encoding="utf-8"))["process"]
        pid, since, alive = mark["pid"], mark["started"], lives(mark)
    except (OSError, ValueError, KeyError, TypeError):
        return
    if alive and pid != os.getpid() and not _has_ended(folder):
        raise ContractError(
            "training.output_dir",
            f"process {pid} writes {folder}, since {since}",
            "Wait for that run or stop it; or name another folder",
        )


def _has_ended(folder: Path) -> bool:
    """The last line is that of the whole training."""
    file = folder / METRICS
    lines = file.read_bytes().splitlines() if file.is_file() else []
    return bool(lines) and b'"train_runtime"' in lines[-1]


def _require_unused(folder: Path) -> None:
    if (folder / METRICS).exists() or checkpoints_in(folder):
        raise ContractError(
            "training.output_dir",
            f"{folder} holds another run",
            "Name a new folder or move the old run away; to go on with that run, set "
            "training.resume to auto",
        )


def _require_states(checkpoint: Checkpoint, processes: int) -> None:
    """What each process added to a checkpoint is for as many processes."""
    made = checkpoint.manifest.processes
    if made != processes and any(checkpoint.manifest.states):
        raise ContractError(
            "training.resume",
            f"auto, and {checkpoint.path} is of {made} processes with a state of each, and there "
            f"are {processes} now",
            f"Launch {made} processes, or start a new run in another folder",
        )


def _require_same_config(config: Config, folder: Path) -> None:
    resolved = folder / RESOLVED
    errors = [
        ContractError(
            key,
            f"is {new!r}, and {resolved} has {old!r}: the run there cannot go on so",
            "Set it back; or start a new run in another folder, with a checkpoint as model.model",
        )
        for key, old, new in _differences(_read_resolved(resolved), config)
    ]
    if errors:
        raise ContractErrors(errors)


def _require_same_run(config: Config, checkpoint: Checkpoint) -> None:
    _require_same_config(config, checkpoint.path.parent)
    digest = data_digest(config.data.train_jsonl)
    if digest != checkpoint.manifest.data_sha256:
        raise ContractError(
            "data.train_jsonl",
            f"{config.data.train_jsonl} is not the file any more that {checkpoint.path} was "
            "trained on",
            "Restore the file, or start a new run in another folder",
        )


def _read_resolved(resolved: Path) -> dict[str, Any]:
    try:
        return read_mapping(resolved)
    except ContractError as error:
        raise ContractError(
            "training.resume",
            f"auto, and {error.where}: {error.found}",
            "Restore it, or start a new run in another folder",
        ) from error


def _differences(before: dict[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Keys that are not free, with both values; those that were unknown then are left out.

    before: what `dump_resolved` wrote.
    """
    then = dict(_leaves(before))
    for key, value in _leaves(config.model_dump(mode="json")):
        free = any(key == name or key.startswith(f"{name}.") for name in FREE)
        if not free and key in then and then[key] != value:
            yield key, then[key], value


def _leaves(mapping: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values; a list is one value."""
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value
