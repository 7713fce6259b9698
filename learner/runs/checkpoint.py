"""Checkpoints that are whole or not there (RUN-01).

    <output_dir>/checkpoint-12/               whole, with a manifest of its files
    <output_dir>/.unfinished/checkpoint-16/   being written, or being removed

    save()            every process writes into `.unfinished`, process 0 renames when all have
    newest_whole()    the checkpoint that a run resumes from

Everything in `.unfinished` is ignored: a killed run leaves it, and the next start clears it.
Within the run folder a rename is one step, on whatever disk that is. Imports no torch.
"""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.runs.atomic_files import open_by_umask, publish_text, removed_unless_whole, writing
from shared_contracts.strict_model import StrictModel

MANIFEST = "rollmatch_state.json"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished"
_BROKEN = ".broken"


class RunFacts(NamedTuple):
    """What process 0 knows of a run when a checkpoint is made of it.

    weights_version: of the newest push; those of a resumed run count on from it.
    data_sha256: of the file of training samples.
    logs: bytes of each log of the run folder, by name.
    """

    weights_version: int
    data_sha256: str
    logs: dict[str, int]


class Manifest(StrictModel):
    """What a checkpoint holds beside what Trainer saves.

    step: optimizer steps that were made, which is the position in the data as well.
    processes: that made them.
    states: what each process added, by rank; empty where no process keeps a state between steps.
    files: bytes of each file of the checkpoint, by its path in it; all but the manifest.
    The rest as in `RunFacts`.
    """

    format: int
    step: int
    processes: int
    weights_version: int
    data_sha256: str
    logs: dict[str, int]
    states: list[dict[str, Any]]
    files: dict[str, int]


@dataclass(frozen=True)
class Checkpoint:
    """A whole one."""

    path: Path
    manifest: Manifest


class BrokenCheckpoint(Exception):
    """A folder with the name of a checkpoint that is not whole; says what is wrong with it."""


class Checkpoints:
    """The checkpoints of a run, written by all of its processes.

    folder: of the run. keep: how many stay there; None: all.
    facts: of the run; None in all processes but the first.
    state: what each process adds, in values of JSON; they are in the manifest.
    collective: processes wait for each other while they write.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None,
        facts: Callable[[], RunFacts] | None,
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
        """Make `checkpoint-<step>` of what `write` leaves in a folder of that name.

        write: writes this process's part into `<unfinished>/checkpoint-<step>`.

        Raises:
            RunError: the disk is full; in every process, as is any other error. No part of
                the checkpoint is left then, and those before it stay.
        """
        final = self._folder / f"checkpoint-{step}"

        def written() -> dict[str, Any]:
            with writing(final):
                write()
            return self._state()

        def published() -> None:
            with writing(final):
                self._publish(final, step, states)

        broadcast_from_rank0(self._peers, lambda: clear_unfinished(self._folder))
        states = self._written_by_all(written)
        with self._cleared_on_error():
            broadcast_from_rank0(self._peers, published)

    def _written_by_all(self, written: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """What each process wrote; no process removes what another one still writes.

        If processes wait for each other while they write, a failure ends all of them at once.
        """
        failures: list[Exception] = []

        def attempted() -> dict[str, Any]:
            try:
                return written()
            except Exception as error:
                if self._collective:
                    raise
                failures.append(error)
                return {}

        def all_well() -> None:
            for failure in failures:
                raise failure

        with self._cleared_on_error():
            states = self._peers.all_gather(attempted)
            self._peers.all_gather(all_well)
        return states

    def _cleared_on_error(self) -> AbstractContextManager[None]:
        return removed_unless_whole(self.unfinished) if self._peers.rank == 0 else nullcontext()

    def _publish(self, final: Path, step: int, states: list[dict[str, Any]]) -> None:
        assert self._facts is not None, "process 0 has them"
        part = self.unfinished / final.name
        manifest = Manifest(
            format=FORMAT,
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
    """Folders with the name of a checkpoint, newest first; whether whole or not."""
    paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    named = [path for path in paths if step_of(path) is not None]
    return sorted(named, key=lambda path: step_of(path) or 0, reverse=True)


def step_of(checkpoint: Path) -> int | None:
    """The step in the name of a checkpoint; None for another name."""
    named = _NAME.fullmatch(checkpoint.name)
    return int(named[1]) if named else None


def newest_whole(folder: Path) -> tuple[Checkpoint | None, list[BrokenCheckpoint]]:
    """The newest whole checkpoint of a run folder, and what is wrong with those after it."""
    broken: list[BrokenCheckpoint] = []
    for path in checkpoints_in(folder):
        try:
            return read_checkpoint(path), broken
        except BrokenCheckpoint as error:
            broken.append(error)
    return None, broken


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, by its manifest; raises BrokenCheckpoint."""
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        raise BrokenCheckpoint(f"{path} has no {MANIFEST} that can be read") from error
    if manifest.format != FORMAT:
        raise BrokenCheckpoint(f"{path} has format {manifest.format}, this version has {FORMAT}")
    found = _sizes(path)
    for name, size in manifest.files.items():
        if name not in found:
            raise BrokenCheckpoint(f"{path} has lost {name}")
        if found[name] != size:
            raise BrokenCheckpoint(f"{path / name} has {found[name]} bytes of {size}")
    return Checkpoint(path, manifest)


def set_broken_aside(folder: Path, start: Checkpoint) -> None:
    """Give the checkpoints after `start` names that are no checkpoint's."""
    for path in checkpoints_in(folder):
        if path == start.path:
            return
        aside = path.with_name(path.name + _BROKEN)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


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
    """Have the disk hold what was written, before anything older is removed."""
    for path in [folder, *(folder.rglob("*") if below else ())]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
