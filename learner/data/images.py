"""Images as the model sees them: the first frame, upright as the camera says, in RGB."""

import hashlib
import io
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from shared_contracts.errors import ContractError

# What the rollout server opens.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# EXIF orientations that exchange width and height.
_ON_ITS_SIDE = (5, 6, 7, 8)


class UnreadableImage(Exception):
    """An image a run would trip over; the message says why."""

    def of(self, sample_id: str) -> ContractError:
        """The error of the sample that has it."""
        return ContractError(
            sample_id, f"one of its images {self}", "Replace it, or remove the line."
        )


class Look(NamedTuple):
    """An image that can be decoded.

    size: width and height in pixels, upright.
    digest: of the file's bytes; the same for copies under other names.
    turned: the file holds it lying on its side (EXIF orientation).
    """

    size: tuple[int, int]
    digest: bytes
    turned: bool


# Images with what was seen of each.
Looks = Iterable[tuple[Path, Look | UnreadableImage]]
# Goes over images as they are looked at, given how many there are, e.g. showing a bar.
Watch = Callable[[Looks, int], Looks]


def size_told(size: tuple[int, int], path: Path, look: Look) -> str:
    """How a line's width and height are not those of its image."""
    turned = " once it is turned upright as its EXIF orientation says" if look.turned else ""
    return (
        f"width x height is {size[0]}x{size[1]}, and image {path} has "
        f"{look.size[0]}x{look.size[1]} pixels{turned}"
    )


def open_upright(path: Path) -> Image.Image:
    """Decode an image; raises UnreadableImage."""
    return upright(_read(path))


def upright(content: bytes) -> Image.Image:
    """Decode the bytes of an image file; raises UnreadableImage."""
    return _decode(content).convert("RGB")


def upright_size(path: Path) -> tuple[int, int]:
    """Width and height, read from the header alone; raises UnreadableImage."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) in _ON_ITS_SIDE
            return (image.height, image.width) if turned else image.size
    except Exception as error:  # Pillow's decoders raise nearly anything for broken files
        raise UnreadableImage(f"cannot be read ({error})") from error


def look_at(path: Path) -> Look:
    """Decode an image and keep none of its pixels; raises UnreadableImage."""
    content = _read(path)
    decoded = _decode(content)
    with Image.open(io.BytesIO(content)) as stored:
        turned = stored.size != decoded.size
    return Look(decoded.size, hashlib.blake2b(content, digest_size=16).digest(), turned)


def look_at_all(paths: Sequence[Path]) -> Iterator[tuple[Path, Look | UnreadableImage]]:
    """Look at each image, several at a time, in the order of `paths`."""
    workers = os.cpu_count() or 1
    remaining = iter(paths)
    with ThreadPoolExecutor(workers) as pool, large_images_allowed():
        ahead: deque[tuple[Path, Future[Look | UnreadableImage]]] = deque(
            (path, pool.submit(_outcome, path)) for path in islice(remaining, 4 * workers)
        )
        while ahead:
            path, future = ahead.popleft()
            yield path, future.result()
            ahead.extend((path, pool.submit(_outcome, path)) for path in islice(remaining, 1))


def _outcome(path: Path) -> Look | UnreadableImage:
    try:
        return look_at(path)
    except UnreadableImage as error:
        return error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableImage(f"cannot be read ({error.strerror})") from error
    except ValueError as error:  # a NUL in the name
        raise UnreadableImage(f"cannot be read ({error})") from error


def _decode(content: bytes) -> Image.Image:
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            return ImageOps.exif_transpose(image)
    except UnidentifiedImageError as error:
        raise UnreadableImage(f"is no image of a known format ({', '.join(FORMATS)})") from error
    except Exception as error:  # Pillow's decoders raise nearly anything for broken files
        raise UnreadableImage(f"cannot be decoded ({error})") from error


@contextmanager
def large_images_allowed() -> Iterator[None]:
    """Without Pillow's warning about images of more than 89 megapixels, which it decodes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield
