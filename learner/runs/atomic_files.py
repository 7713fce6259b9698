"""Files and directories that appear complete or not at all; errors of full or read-only disks."""

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from shared_contracts.errors import ContractError, RunError

# Errors of full and read-only disks, and what to do.
_NO_WRITING = {
    errno.ENOSPC: "Make room on that disk",
    errno.EDQUOT: "Make room within your quota",
    errno.EROFS: "Mount that disk for writing",
}
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
    require_folder(str(out), out)


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
    _require_writable(where, folder, folder.absolute(), "Name a folder that can be written to.")


def _require_parent(where: str, path: Path) -> None:
    do = "Name a path in a folder that can be written to."
    _require_writable(where, path, path.absolute().parent, do)


def _require_writable(where: str, path: Path, folder: Path, do: str) -> None:
    """Raise ContractError unless a file can be made in `folder`, or in its nearest parent."""
    can = "cannot be made"
    try:
        if path.exists() and folder == path.absolute():
            can = "cannot be written to"
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryDirectory(dir=folder):
            pass
    except OSError as error:
        named = path if error.errno == errno.ENAMETOOLONG else folder
        found = f"{path} {can} ({error.strerror}: {named})"
        raise ContractError(where, found, do) from error


def publish_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8 to a temporary name beside `path`, then rename it to `path`.

    Raises RunError when the disk is full.
    """
    part = path.with_name(path.name + ".part")
    with removed_unless_whole(part), writing(path):
        part.write_bytes(text.encode())
        part.rename(path)


def append_line(path: Path, line: str) -> None:
    """Append the whole line or nothing; raises RunError if the disk is full."""
    with writing(path), path.open("ab", buffering=0) as file:
        before = file.tell()
        data = f"{line}\n".encode()
        try:
            written = file.write(data)
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


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
            f"cannot write {path}: {os.strerror(code)}. {_NO_WRITING[code]}, or set "
            "training.output_dir to a folder on another disk, and start again"
        ) from error


def expect_full_disks_in_threads() -> None:
    """Print no traceback if a thread fails on a full or read-only disk.

    TensorBoard's writer thread fails first; the logging thread then raises the same error.
    """
    former = threading.excepthook

    def hook(unhandled: threading.ExceptHookArgs) -> None:
        error = unhandled.exc_value
        if not (isinstance(error, OSError) and error.errno in _NO_WRITING):
            former(unhandled)

    threading.excepthook = hook


def _no_writing(error: Exception, path: Path) -> int | None:
    """Return the key of `_NO_WRITING` for an error; None for other errors."""
    if isinstance(error, OSError):
        return error.errno if error.errno in _NO_WRITING else None
    if isinstance(error, SafetensorError):
        return next((code for code in _NO_WRITING if os.strerror(code) in str(error)), None)
    full = _TORCH_WRITER in str(error) and shutil.disk_usage(path.parent).free < _FULL_BYTES
    return errno.ENOSPC if full else None
