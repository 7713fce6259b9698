"""Files and directories that appear whole or not at all, and disks that are full."""

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

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What torch.save raises when a write failed; it does not say why.
_TORCH_WRITER = "inline_container"
_NEXT_TO_NOTHING = 2**20


@contextmanager
def publish_directory(out: Path) -> Iterator[Path]:
    """Yield an empty directory beside `out`; rename it to `out` when the block succeeds.

    When the block raises, nothing is left behind.

    Raises:
        ContractError: `out` is a file or a directory with something in it.
    """
    require_free(out)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def require_free(out: Path) -> None:
    """Raise ContractError unless `out` is an empty directory, or absent and can be made."""
    if not out.name:
        raise ContractError(str(out), "it has no name of its own", "Name a new directory.")
    _require_writable(str(out), out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ContractError(
            str(out),
            "it exists already and is not an empty directory",
            "Name a new directory, or remove this one first.",
        )


def require_new_file(option: str, path: Path) -> None:
    """Raise ContractError unless `path` is absent and can be made."""
    _require_writable(option, path)
    if path.exists():
        raise ContractError(option, f"{path} exists already", "Name a new file.")


def _require_writable(where: str, path: Path) -> None:
    """The folder `path` will be in takes new files, or the nearest above it that is there."""
    try:
        folder = path.absolute().parent
        while not folder.exists():
            folder = folder.parent
        path.exists()  # raises for a name that is too long
        with tempfile.TemporaryDirectory(dir=folder):
            pass
    except OSError as error:
        raise ContractError(
            where,
            f"{path} cannot be made ({error.strerror}: {error.filename})",
            "Name a path in a folder that can be written to.",
        ) from error


def publish_text(path: Path, text: str) -> None:
    """`publish_bytes` of the text in UTF-8."""
    publish_bytes(path, text.encode())


def publish_bytes(path: Path, content: bytes) -> None:
    """Write `content` to a temporary name beside `path`, then rename it to `path`.

    Raises RunError when the disk is full.
    """
    part = path.with_name(path.name + ".part")
    with removed_unless_whole(part), writing(path):
        part.write_bytes(content)
        part.rename(path)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, or nothing; raises RunError when the disk is full."""
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
    """Tell by name what the block could not write because the disk is full.

    Raises RunError in place of what a full disk makes Python, safetensors and torch raise.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not _is_full(error, path):
            raise
        raise RunError(
            f"cannot write {path}: {os.strerror(errno.ENOSPC)}. Make room on that disk, or set "
            "training.output_dir to a folder on another one, and start again"
        ) from error


def expect_full_disks_in_threads() -> None:
    """Print no traceback when a thread of this process finds the disk full.

    TensorBoard's raises the same error once more in the thread that logs.
    """
    former = threading.excepthook

    def hook(unhandled: threading.ExceptHookArgs) -> None:
        error = unhandled.exc_value
        if not (isinstance(error, OSError) and error.errno in _FULL):
            former(unhandled)

    threading.excepthook = hook


def _is_full(error: Exception, path: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    if isinstance(error, SafetensorError):
        return os.strerror(errno.ENOSPC) in str(error)
    return _TORCH_WRITER in str(error) and shutil.disk_usage(path.parent).free < _NEXT_TO_NOTHING
