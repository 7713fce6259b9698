"""Read a local file that lies under an allowed directory, and no other (WIRE-04)."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from rollout_server.chat import ImageSource
from rollout_server.problems import BadRequest

# A FIFO or a device must neither block the open nor become our terminal.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


def read_media_file(source: ImageSource, directories: Sequence[Path], max_bytes: int) -> bytes:
    """The content of the file `source` names by its absolute path; blocking.

    directories: resolved. What counts is where the open file really lies, so nothing is
    gained by exchanging a path for a symbolic link after it was looked at. A percent sign
    is a percent sign. Raises BadRequest; about anything outside of `directories` it tells
    nothing, not even whether it exists.
    """
    path = source.image.removeprefix("file://")
    if not path.startswith("/"):
        raise BadRequest(
            source.where, "neither an absolute path, a data URL nor base64 of an image"
        )
    real = _real_path(path, source)
    _require_inside(real, directories, source)
    try:
        descriptor = os.open(real, _FLAGS)
    except OSError as error:
        raise BadRequest(
            source.where, f"there is no file there that can be read ({error.strerror})"
        ) from None
    try:
        _require_inside(os.readlink(f"/proc/self/fd/{descriptor}"), directories, source)
        return _read(descriptor, source, max_bytes)
    finally:
        os.close(descriptor)


def too_large(max_bytes: int) -> str:
    """What a refusal says of an image beyond the bound, wherever it came from."""
    return f"the image is larger than {max_bytes / 2**20:g} MiB (max_image_mib)"


def _read(descriptor: int, source: ImageSource, max_bytes: int) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise BadRequest(source.where, "that path is no regular file")
    if found.st_size <= max_bytes:
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)  # it may have grown meanwhile
        if len(content) <= max_bytes:
            return content
    raise BadRequest(source.where, too_large(max_bytes))


def _real_path(path: str, source: ImageSource) -> str:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # a NUL, a lone surrogate
        raise BadRequest(source.where, "that path cannot be one") from None


def _require_inside(real: str, directories: Sequence[Path], source: ImageSource) -> None:
    if not any(Path(real).is_relative_to(directory) for directory in directories):
        raise BadRequest(
            source.where,
            "that path is in no directory the server was given (--allowed-media-dir)",
        )
