"""Checkpoints that appear complete or not at all (RUN-01).

    <output_dir>/checkpoint-12/               complete, with a manifest of its files
    <output_dir>/.unfinished/checkpoint-16/   being written or removed

    save()                every process writes into `.unfinished`; process 0 renames the folder
    newest_checkpoint()   the checkpoint that a run resumes from

Everything in `.unfinished` is ignored, and the next start removes it. A rename within the run
folder is atomic. Imports no torch.
"""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.runs.atomic_files import open_by_umask, publish_text, removed_unless_whole, writing
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import StrictModel

MANIFEST = "rollmatch_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished"


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
