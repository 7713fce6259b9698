"""A checkpoint and a file are complete or absent, also after a kill or on a full disk."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.runs.atomic_files import append_line, publish_directory, publish_text, writing
from learner.runs.checkpoint import (
    MANIFEST,
    Checkpoints,
    RunFacts,
    checkpoints_in,
    newest_checkpoint,
    read_checkpoint,
)
from shared_contracts.errors import ContractError, RunError
from tests.unit.ranks_in_threads import in_ranks

pytestmark = pytest.mark.req("RUN-01")

FACTS = RunFacts(weights_version=3, data_sha256="ab", logs={"metrics.jsonl": 7})
# Saves checkpoints 1 to 4 and keeps two. Kills itself at the first audit event EVENT on a path with
# the ending ENDING.
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.test_checkpoint import save
event, ending = sys.argv[2:]
def hook(seen, arguments):
    if seen == event and str(arguments[0]).endswith(ending):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
for step in (1, 2, 3, 4):
    save(Path(sys.argv[1]), step, keep=2)
"""
ROOT = Path(__file__).resolve().parents[2]


def save(
    folder: Path,
    step: int,
    keep: int | None = None,
    peers: Peers = SINGLE_PROCESS,
    state: Callable[[], dict[str, Any]] = dict,
    fail: Exception | None = None,
) -> None:
    """A checkpoint of one file per rank. fail: what the last rank raises."""
    checkpoints = Checkpoints(folder, keep, lambda: FACTS, state, peers)

    def write() -> None:
        part = checkpoints.unfinished / f"checkpoint-{step}"
        part.mkdir(parents=True, exist_ok=True)
        (part / f"rng_{peers.rank}").write_text("state of a rank")
        if fail is not None and peers.rank == peers.count - 1:
            raise fail

    checkpoints.save(step, write)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("count", [1, 3])
def test_a_manifest_has_files_states_and_facts_of_all_ranks(tmp_path: Path, count: int) -> None:
    left = tmp_path / ".unfinished" / "checkpoint-12"
    left.mkdir(parents=True)
    (left / "rng_7").write_text("left by a killed run")
    in_ranks(count, lambda peers: save(tmp_path, 12, 1, peers, lambda: {"rank": peers.rank}))
    assert names(tmp_path) == ["checkpoint-12"]
    manifest = read_checkpoint(tmp_path / "checkpoint-12").manifest
    assert (manifest.step, manifest.processes) == (12, count)
    assert manifest.states == [{"rank": rank} for rank in range(count)]
    assert (manifest.weights_version, manifest.logs) == (3, {"metrics.jsonl": 7})
    assert manifest.files == {f"rng_{rank}": 15 for rank in range(count)}


def test_checkpoints_are_ordered_by_number_and_the_oldest_are_removed(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-100"]
    save(tmp_path, 101)
    assert checkpoints_in(tmp_path)[0].name == "checkpoint-101"
    assert len(checkpoints_in(tmp_path)) == 3


@pytest.mark.req("DDP-01")
@pytest.mark.parametrize("count", [1, 3])
def test_error_in_one_rank_is_raised_in_all_and_leaves_nothing(tmp_path: Path, count: int) -> None:
    save(tmp_path, 1)
    full = OSError(28, "No space left on device")
    outcomes = in_ranks(count, lambda peers: save(tmp_path, 2, 1, peers, fail=full))
    for outcome in outcomes:
        error = outcome.exception()
        assert isinstance(error, RunError)
        assert f"cannot write {tmp_path / 'checkpoint-2'}: No space left on device" in str(error)
    assert names(tmp_path) == ["checkpoint-1"]
    read_checkpoint(tmp_path / "checkpoint-1")


@pytest.mark.req("DDP-01")
def test_a_rank_that_fails_in_a_collective_write_raises_before_the_others_time_out(
    tmp_path: Path,
) -> None:
    """Rank 0 waits for a part of rank 1, as under FSDP2."""
    gather, failed = threading.Barrier(2), threading.Event()

    def saved(peers: Peers) -> None:
        checkpoints = Checkpoints(tmp_path, None, lambda: FACTS, dict, peers, collective=True)

        def write() -> None:
            (checkpoints.unfinished / "checkpoint-1").mkdir(parents=True, exist_ok=True)
            if peers.rank == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            gather.wait(60)

        try:
            checkpoints.save(1, write)
        except RunError:
            if peers.rank == 1:
                failed.set()
                gather.abort()
            raise

    errors = [outcome.exception() for outcome in in_ranks(2, saved)]
    assert failed.is_set()
    assert isinstance(errors[0], threading.BrokenBarrierError), "not a timeout"
    assert "No space left on device" in str(errors[1])


@pytest.mark.parametrize(
    ("event", "ending", "left"),
    [
        ("open", f".unfinished/checkpoint-4/{MANIFEST}.part", ["checkpoint-2", "checkpoint-3"]),
        ("os.rename", ".unfinished/checkpoint-4", ["checkpoint-2", "checkpoint-3"]),
        ("os.rename", "run/checkpoint-2", ["checkpoint-2", "checkpoint-3", "checkpoint-4"]),
        ("os.remove", "rng_0", ["checkpoint-2", "checkpoint-3"]),  # of the first to be removed
    ],
    ids=["manifest", "publish", "retire", "remove"],
)
def test_a_killed_process_leaves_only_complete_checkpoints(
    tmp_path: Path, event: str, ending: str, left: list[str]
) -> None:
    folder = tmp_path / "run"
    script = KILLED.format(root=str(ROOT))
    command = [sys.executable, "-c", script, str(folder), event, ending]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert names(folder) == [".unfinished", *left]
    for name in left:
        read_checkpoint(folder / name)
    save(folder, 5, keep=2)
    assert names(folder) == [left[-1], "checkpoint-5"]


@pytest.mark.parametrize(
    ("broken_by", "fault"),
    [
        (lambda file, _: os.truncate(file, 3), "rng_0 has 3 bytes of 15"),
        (lambda file, _: file.unlink(), "rng_0 has no bytes of 15"),
        (lambda _, manifest: manifest.unlink(), f"has no {MANIFEST}"),
        (lambda _, manifest: os.truncate(manifest, 40), f"has no {MANIFEST}"),
        (
            lambda _, manifest: manifest.write_text(
                json.dumps({**json.loads(manifest.read_text()), "format": 2})
            ),
            f"has no {MANIFEST} that this version can read",
        ),
    ],
    ids=["shorter", "lost", "no manifest", "half a manifest", "newer"],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    tmp_path: Path, broken_by: Callable[[Path, Path], object], fault: str
) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    path = tmp_path / "checkpoint-4"
    broken_by(path / "rng_0", path / MANIFEST)
    with pytest.raises(ContractError, match=fault) as caught:
        newest_checkpoint(tmp_path)
    assert str(path) in caught.value.found
    assert "use an earlier checkpoint" in caught.value.do
    shutil.rmtree(path)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.manifest.step == 2


FULL = Path("/dev/full")


def test_a_text_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    publish_text(path, "{}\n")
    assert path.read_text() == "{}\n"
    (tmp_path / "run.json.part").symlink_to(FULL)
    with pytest.raises(RunError, match=r"run\.json: No space left on device\. Make room") as caught:
        publish_text(path, "more\n")
    assert str(path) in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text() == "{}\n"


def test_lines_are_appended_and_a_full_disk_is_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, "é")
    append_line(path, "b")
    assert path.read_bytes() == "é\nb\n".encode()
    full = tmp_path / "full.jsonl"
    full.symlink_to(FULL)
    with pytest.raises(RunError, match=r"full\.jsonl: No space left on device"):
        append_line(full, "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 3, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_line(path, "only three bytes have room")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == "é\nb\n".encode()


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing(tmp_path):
        (tmp_path / "absent").read_text()
    with pytest.raises(RuntimeError, match="CUDA out of memory"), writing(tmp_path):
        raise RuntimeError("CUDA out of memory")
    with pytest.raises(RuntimeError), writing(tmp_path / "o.pt"):  # the disk has room
        torch.save({}, FULL)


def test_a_disk_that_became_read_only_is_told(tmp_path: Path) -> None:
    for error in (OSError(errno.EROFS, "x"), SafetensorError(os.strerror(errno.EROFS))):
        with pytest.raises(RunError) as caught, writing(tmp_path / "run"):
            raise error
        assert str(caught.value).startswith(
            f"cannot write {tmp_path / 'run'}: Read-only file system. Mount that disk for writing, "
        )


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    (tmp_path / "deep" / "out.part" / "left by a killed program").mkdir(parents=True)
    with suppress(RuntimeError), publish_directory(out) as part:
        (part / "first").touch()
        assert not out.exists()
        raise RuntimeError
    assert not list(out.parent.iterdir())
    with publish_directory(out) as part:
        (part / "first").touch()
    assert list(out.parent.rglob("*")) == [out, out / "first"]
