"""Images as the model sees them: the first frame, upright as EXIF says, in 8-bit RGB.

`shared_contracts.images` has the rule for each mode, which the server follows as well.
"""

import hashlib
import io
import os
import struct
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from learner.data.jsonl import DataProblem
from shared_contracts.images import FORMATS, ModeRefused, as_rgb, require_mode

# Pillow decodes images of more than 89 megapixels, and warns of each.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)
# EXIF orientations that exchange width and height.
_ON_ITS_SIDE = (5, 6, 7, 8)
_NOT_AS_STORED = (2, 3, 4, *_ON_ITS_SIDE)
# Parts of a PNG that may hold an orientation.
_TELLING_CHUNKS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")


class UnreadableImage(Exception):
    """An image a run would trip over; the message says why."""


class Look(NamedTuple):
    """An image that can be decoded.

    size: width and height in pixels, upright.
    reoriented: its EXIF orientation turns or mirrors it.
    digest: of the file's bytes; the same for copies under other names; empty where only the
        header was read.
    """

    size: tuple[int, int]
    reoriented: bool
    digest: bytes = b""


# What was seen of an image, and images with what was seen of each.
Seen = Look | UnreadableImage
Looks = Iterable[tuple[Path, Seen]]
# Goes over images as they are looked at, given how many there are, e.g. showing a bar.
Watch = Callable[[Looks, int], Looks]


def image_problem(
    sample_id: str, size: tuple[int, int] | None, path: Path, look: Seen
) -> DataProblem | None:
    """What is wrong with an image of a sample, if it is. size: as its line says, if it does."""
    if isinstance(look, UnreadableImage):
        do = "Replace it, mend its path (from the data file, or absolute), or remove the line."
        return DataProblem("unreadable image", sample_id, f"image {path} {look}", do)
    if size is None or size == look.size:
        return None
    turned = " once it is turned upright as its EXIF orientation says" if look.reoriented else ""
    found = (
        f"width x height is {size[0]}x{size[1]}, and image {path} has "
        f"{look.size[0]}x{look.size[1]} pixels{turned}"
    )
    do = "Give its size, and see that the boxes were made for this image."
    return DataProblem("other image size", sample_id, found, do)


def open_upright(path: Path) -> Image.Image:
    """Decode an image; raises UnreadableImage."""
    return upright(_read(path))


def upright(content: bytes) -> Image.Image:
    """Decode the bytes of an image file; raises UnreadableImage."""
    return as_rgb(_decode(content))


def look_at_header(path: Path) -> Look:
    """Read the header of an image and no pixels; raises UnreadableImage."""
    with _opened(path) as image:
        # Pillow decodes a PNG before it gives its EXIF, which may stand behind the pixels.
        all_at_head = image.format == "PNG" and not _tells_more_behind_pixels(path)
        exif = Image.Image.getexif(image) if all_at_head else image.getexif()
        orientation = exif.get(ExifTags.Base.Orientation, 1)
        size = image.size[::-1] if orientation in _ON_ITS_SIDE else image.size
        return Look(size, orientation in _NOT_AS_STORED)


def _tells_more_behind_pixels(png: Path) -> bool:
    """Whether a PNG has EXIF or text, which may be XMP, behind its pixels; passes over those."""
    with png.open("rb") as file:
        file.seek(len(b"\x89PNG\r\n\x1a\n"))
        pixels_passed = False
        while len(head := file.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            pixels_passed = pixels_passed or name == b"IDAT"
            if pixels_passed and name in _TELLING_CHUNKS:
                return True
            file.seek(length + len(b"CRC."), os.SEEK_CUR)
    return False


def look_at(path: Path) -> Look:
    """Decode an image and keep none of its pixels; raises UnreadableImage."""
    content = _read(path)
    _decode(content)
    return look_at_header(path)._replace(digest=hashlib.blake2b(content, digest_size=16).digest())


def seen_of(path: Path, look: Callable[[Path], Look] = look_at) -> Seen:
    try:
        return look(path)
    except UnreadableImage as error:
        return error


def look_at_all(paths: Sequence[Path], look: Callable[[Path], Look] = look_at) -> Looks:
    """Look at each image, several at a time, in the order of `paths`."""
    outcome = partial(seen_of, look=look)
    workers = os.cpu_count() or 1
    remaining = iter(paths)
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[tuple[Path, Future[Seen]]] = deque(
            (path, pool.submit(outcome, path)) for path in islice(remaining, 4 * workers)
        )
        while ahead:
            path, future = ahead.popleft()
            yield path, future.result()
            ahead.extend((path, pool.submit(outcome, path)) for path in islice(remaining, 1))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise UnreadableImage(f"cannot be read ({why})") from error


def _decode(content: bytes) -> Image.Image:
    with _opened(io.BytesIO(content)) as image:
        return ImageOps.exif_transpose(image)


@contextmanager
def _opened(file: Path | io.BytesIO) -> Iterator[Image.Image]:
    """An image whose header was read; raises UnreadableImage, also for errors of the body."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            require_mode(image)
            yield image
    except ModeRefused as error:
        raise UnreadableImage(str(error)) from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(f"is no image of a known format ({', '.join(FORMATS)})") from error
    except Exception as error:  # Pillow's decoders raise nearly anything for broken files
        if isinstance(error, OSError) and error.strerror:  # of the file, not of what it holds
            raise UnreadableImage(f"cannot be read ({error.strerror})") from error
        raise UnreadableImage(f"cannot be decoded ({error})") from error
