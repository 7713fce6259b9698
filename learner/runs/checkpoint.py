"""Checkpoints that appear complete or not at all, and where a run starts (RUN-01).

    <output_dir>/checkpoint-12/               complete, with a manifest of its files
    <output_dir>/.unfinished/checkpoint-16/   being written or removed

Everything in `.unfinished` is ignored, and the next start removes it. A rename within the run
folder is atomic. Imports no torch.

A resumed run has the config of `resolved_config.yaml`, except the keys that the schema marks
`FreeOnResume`: its length, what it saves and logs, and the backend. These do not change the samples
of a step or the loss. Another backend changes which answers share a pack.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError

from learner.config.schema import Config, LoraTuner
from learner.config.yaml12 import read_mapping
from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.runs.atomic_files import (
    open_by_umask,
    publish_text,
    removed_unless_whole,
    require_folder,
    writing,
)
from learner.runs.rollout_log import ROLLOUTS, logged_in
from learner.runs.run_folder import EVALUATIONS, METRICS, RESOLVED, RunFolder, lock_folder
from shared_contracts.errors import CheckErrors, ContractError, ContractErrors
from shared_contracts.strict_model import FREE_ON_RESUME, StrictModel

MANIFEST = "rollmatch_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished"
_CUT_LOGS = ("metrics.jsonl", "rollout_calls*.jsonl")
_EVALUATION = re.compile(r"step_(\d+)(\.part)?")


class RunFacts(NamedTuple):
    """State of the run that process 0 adds to a checkpoint.

    weights_version: of the newest push; a resumed run continues from it.
    data_sha256: of the file of training samples.
    logs: bytes of each log of the run folder, by name.
    """

    weights_version: int
    data_sha256: str
    logs: dict[str, int]


class CheckpointManifest(StrictModel):
    """A checkpoint's state beside the Trainer's.

    step: completed optimizer steps, which are also the position in the data.
    processes: their number in the run.
    states: of each process, by rank; empty dicts if none has a state between steps.
    files: bytes of each file by its relative path, without the manifest.
    The rest as in `RunFacts`.
    """

    format: Literal[1] = 1
    step: int
    processes: int
    weights_version: int
    data_sha256: str
    logs: dict[str, int]
    states: list[dict[str, Any]]
    files: dict[str, int]


@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    manifest: CheckpointManifest


class Checkpoints:
    """The checkpoints of a run, written by all of its processes.

    folder: of the run. keep: number of checkpoints that stay; None: all.
    facts: of the run; called in process 0 alone.
    state: returns the JSON state of this process for the manifest.
    collective: whether processes wait for each other while they write.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None,
        facts: Callable[[], RunFacts],
        state: Callable[[], dict[str, Any]] = dict,
        peers: Peers = SINGLE_PROCESS,
        *,
        collective: bool = False,
    ) -> None:
        self.unfinished = folder / _UNFINISHED
        self._folder = folder
        self._keep = keep
        self._facts = facts
        self._state = state
        self._peers = peers
        self._collective = collective

    def save(self, step: int, write: Callable[[], None]) -> None:
        """Publish `checkpoint-<step>`.

        write: writes this process's part into `<unfinished>/checkpoint-<step>`.

        Raises RunError in every process if the disk is full. After this or another error no part
        of the checkpoint is left, and earlier checkpoints stay.
        """
        final = self._folder / f"checkpoint-{step}"
        failures: list[Exception] = []

        def write_part() -> dict[str, Any]:
            try:
                with writing(final):
                    write()
                return self._state()
            except Exception as error:
                if self._collective:  # the others wait for this process within `write`
                    raise
                failures.append(error)
                return {}

        def raise_failure() -> None:
            for failure in failures:
                raise failure

        def publish() -> None:
            with writing(final):
                self._publish(final, step, states)

        broadcast_from_rank0(self._peers, lambda: clear_unfinished(self._folder))
        with removed_unless_whole(self.unfinished) if self._peers.rank == 0 else nullcontext():
            states = self._peers.all_gather(write_part)
            self._peers.all_gather(raise_failure)  # after all have written: nothing is half removed
            broadcast_from_rank0(self._peers, publish)

    def _publish(self, final: Path, step: int, states: list[dict[str, Any]]) -> None:
        part = self.unfinished / final.name
        manifest = CheckpointManifest(
            step=step,
            processes=self._peers.count,
            states=states,
            files=_sizes(part),
            **self._facts()._asdict(),
        )
        open_by_umask(part)
        publish_text(part / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
        _to_disk(part)
        part.rename(final)
        _to_disk(final.parent, below=False)
        remove_old(self._folder, self._keep)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the folders with the name of a checkpoint, newest first, also incomplete ones."""
    paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    named = [path for path in paths if step_of(path) is not None]
    return sorted(named, key=lambda path: step_of(path) or 0, reverse=True)


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint; None for another name."""
    named = _NAME.fullmatch(checkpoint.name)
    return int(named[1]) if named else None


def newest_checkpoint(folder: Path) -> SavedCheckpoint | None:
    """Return the newest checkpoint of a run folder; raises as `read_checkpoint`."""
    return next((read_checkpoint(path) for path in checkpoints_in(folder)), None)


def read_checkpoint(path: Path, where: str = "training.output_dir") -> SavedCheckpoint:
    """Check a folder against its manifest; raises ContractError, at `where`, if it lacks a file."""
    do = "Restore it from a copy, or remove it and use an earlier checkpoint"
    try:
        manifest = CheckpointManifest.model_validate_json((path / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        found = f"{path} has no {MANIFEST} that this version can read"
        raise ContractError(where, found, do) from error
    sizes = _sizes(path)
    for name, size in manifest.files.items():
        if sizes.get(name) != size:
            found = f"{path / name} has {sizes.get(name, 'no')} bytes of {size}"
            raise ContractError(where, found, do)
    return SavedCheckpoint(path, manifest)


def remove_old(folder: Path, keep: int | None) -> None:
    """Remove all checkpoints but the newest `keep` (None: none), and `.unfinished`."""
    for old in checkpoints_in(folder)[keep:] if keep else []:
        (folder / _UNFINISHED).mkdir(exist_ok=True)
        old.rename(folder / _UNFINISHED / old.name)
    clear_unfinished(folder)


def clear_unfinished(folder: Path) -> None:
    """Remove `.unfinished`; a file that cannot be removed is left."""
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)


def _sizes(folder: Path) -> dict[str, int]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}


def _to_disk(folder: Path, *, below: bool = True) -> None:
    """Flush a folder to disk; with `below`, also everything in it."""
    for path in [folder, *(folder.rglob("*") if below else ())]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
