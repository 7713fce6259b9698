"""Files and directories that appear complete or not at all; errors of full or read-only disks."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from shared_contracts.errors import ContractError, RunError

# Errors of full and read-only disks.
_NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# In the error that torch.save raises after a failed write. The error has no cause: the disk counts
# as full if it has less than `_FULL_BYTES` free.
_TORCH_WRITER = "inline_container"
_FULL_BYTES = 2**20


@contextmanager
def publish_directory(out: Path) -> Iterator[Path]:
    """Yield an empty directory beside `out`; rename it to `out` when the block succeeds.

    If the block raises, the directory is removed.

    Raises ContractError if `out` is a file or a directory that is not empty.
    """
    require_free(out)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        open_by_umask(part)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def open_by_umask(folder: Path) -> None:
    """Give every file below `folder` the mode of a new file there.

    Some libraries write files with mode 600, such as safetensors.
    """
    part = folder / ".mode"
    part.touch()
    mode = part.stat().st_mode
    part.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode != mode:
            path.chmod(mode)


def require_free(out: Path) -> None:
    """Raise ContractError unless `out` is an empty directory, or absent and can be made."""
    if not out.name:
        raise ContractError(str(out), "it has no name", "Name a new directory.")
    _require_parent(str(out), out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ContractError(
            str(out),
            "it exists already and is not an empty directory",
            "Name a new directory, or remove this one first.",
        )


def require_new_file(option: str, path: Path) -> None:
    """Raise ContractError unless `path` is absent and can be made."""
    require_file(option, path)
    if path.exists():
        raise ContractError(option, f"{path} exists already", "Name a new file.")


def require_file(option: str, path: Path) -> None:
    """Raise ContractError unless the file `path` can be made or replaced."""
    _require_parent(option, path)
    if path.is_dir():
        raise ContractError(option, f"{path} is a folder", "Name a file.")


def require_folder(where: str, folder: Path) -> None:
    """Raise ContractError unless `folder` can be made, or new files can be made in it."""
    _require_writable(where, folder, folder.absolute())


def _require_parent(where: str, path: Path) -> None:
    _require_writable(where, path, path.absolute().parent)


def _require_writable(where: str, path: Path, folder: Path) -> None:
    """Raise ContractError unless a file can be made in `folder`, or in its nearest parent."""
    try:
        path.exists()  # raises for a name that is too long
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryDirectory(dir=folder):
            pass
    except OSError as error:
        found = f"{path} cannot be written ({error.strerror}: {folder})"
        raise ContractError(where, found, "Name a path that can be written to.") from error


def publish_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8 to a temporary name beside `path`, then rename it to `path`.

    Raises RunError when the disk is full.
    """
    part = path.with_name(path.name + ".part")
    with removed_unless_whole(part), writing(path):
        part.write_bytes(text.encode())
        part.rename(path)


def append_line(path: Path, line: str) -> None:
    """Append a line; readers ignore an incomplete last one. Raises RunError on a full disk."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


@contextmanager
def removed_unless_whole(path: Path) -> Iterator[None]:
    """Remove the file or folder `path` when the block that writes it raises."""
    try:
        yield
    except BaseException:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise RunError if Python, safetensors or torch fail in the block on a full or read-only disk.

    path: named in the error.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if (code := _no_writing(error, path)) is None:
            raise
        raise RunError(
            f"cannot write {path}: {os.strerror(code)}. Make room on that disk, or set "
            "training.output_dir to a folder on another disk, and start again"
        ) from error


def _no_writing(error: Exception, path: Path) -> int | None:
    """Return which of `_NO_WRITING` an error is; None for other errors."""
    if isinstance(error, OSError):
        return error.errno if error.errno in _NO_WRITING else None
    if isinstance(error, SafetensorError):
        return next((code for code in _NO_WRITING if os.strerror(code) in str(error)), None)
    full = _TORCH_WRITER in str(error) and shutil.disk_usage(path.parent).free < _FULL_BYTES
    return errno.ENOSPC if full else None
