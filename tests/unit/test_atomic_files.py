"""Files that appear whole or not at all, also on a full disk (`/dev/full` is one)."""

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from learner.runs.atomic_files import append_line, publish_directory, publish_text, writing
from shared_contracts.errors import RunError

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
