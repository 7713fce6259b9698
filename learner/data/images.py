"""Decode images to model input: the first frame, turned upright by EXIF, in 8-bit RGB.

`shared_contracts.images` defines the conversion of each mode for learner and server.
"""

import hashlib
import io
import os
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple, Protocol

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from rich.console import Console

from learner.data.files import DataProblem
from learner.distributed.waiting import reporting_waits, waiting_for
from learner.runs.console import tell
from learner.types import Sample
from shared_contracts.images import FORMATS, ModeRefused, as_rgb, require_mode

# Pillow decodes images above 89 megapixels with a warning.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)
# EXIF orientations that exchange width and height.
_TRANSPOSED = (5, 6, 7, 8)
_REORIENTED = (2, 3, 4, *_TRANSPOSED)
# Images that a thread takes at once.
_CHUNK = 16
# PNG chunks that may hold an orientation.
_ORIENTATION_CHUNKS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")


class UnreadableImage(Exception):
    """An image that cannot be read or decoded; the message has the reason."""


class ImageInfo(NamedTuple):
    """size: width and height in pixels, upright. reoriented: EXIF turns or mirrors the image.

    digest: of the file's bytes; empty if only the header was read.
    """

    size: tuple[int, int]
    reoriented: bool
    digest: bytes = b""


ImageResult = ImageInfo | UnreadableImage


class ImageRule(Protocol):
    """Token counts of a model's image processor.

    max_aspect: the largest ratio of the sides that the processor accepts.
    """

    @property
    def max_aspect(self) -> int: ...

    def tokens(self, width: int, height: int) -> int | None:
        """Return the tokens of an image of this size in pixels; None if it is too narrow."""


def image_problems(
    sample: Sample, results: Mapping[Path, ImageResult], rule: ImageRule | None = None
) -> Iterator[DataProblem]:
    """Yield the problems of a sample's images; its size is that of the first.

    rule: of the model's processor; None: not checked.
    """
    stated = (sample.width, sample.height)
    for path in dict.fromkeys(sample.images):
        result, size = results[path], stated if path == sample.images[0] else None
        if isinstance(result, UnreadableImage):
            kind, found = "unreadable image", f"image {path} {result}"
            do = "Replace it, correct its path (absolute, or from the file), or remove the line."
        elif size not in (None, result.size):
            kind = "other image size"
            upright = " once it is turned upright as its EXIF orientation says"
            found = (
                f"width x height is {sample.width}x{sample.height}, and image {path} has "
                f"{result.size[0]}x{result.size[1]} pixels{upright if result.reoriented else ''}"
            )
            do = "Give its size, and see that the boxes were made for this image."
        elif rule is not None and rule.tokens(*result.size) is None:
            kind, do = "image too narrow", "Cut the image, or remove the line."
            found = (
                f"image {path} has {result.size[0]}x{result.size[1]} pixels, and the model's "
                f"processor refuses sides of a ratio above {rule.max_aspect}"
            )
        else:
            continue
        yield DataProblem(kind, sample.sample_id, found, do)


def open_upright(file: Path | io.BytesIO) -> Image.Image:
    with _opened(file) as image:
        return as_rgb(ImageOps.exif_transpose(image))


def inspect_image(path: Path, *, decode: bool = False) -> ImageResult:
    """Return what the header of an image shows; its pixels are read only to `decode` it."""
    digest = b""
    try:
        if decode:
            open_upright(path)
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
        with _opened(path) as image:
            # PngImageFile.getexif decodes the pixels, as EXIF may follow them.
            header_only = image.format == "PNG" and not _has_metadata_after_pixels(path)
            exif = Image.Image.getexif(image) if header_only else image.getexif()
            orientation = exif.get(ExifTags.Base.Orientation, 1)
            size = image.size[::-1] if orientation in _TRANSPOSED else image.size
            return ImageInfo(size, orientation in _REORIENTED, digest)
    except UnreadableImage as error:
        return error


def inspect_all(paths: Iterable[Path], *, decode: bool = False) -> dict[Path, ImageResult]:
    """Inspect images in threads, each once; process 0 shows the progress on stderr."""
    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    results: dict[Path, ImageResult] = {}
    different = list(dict.fromkeys(paths))
    waiting = waiting_for("images to be read", lambda: f"{len(results)} of {len(different)}")
    with ThreadPool() as pool, reporting_waits(partial(tell, console)), waiting:
        found = pool.imap(partial(inspect_image, decode=decode), different, _CHUNK)
        results.update(zip(different, found, strict=True))
    return results


def _has_metadata_after_pixels(png: Path) -> bool:
    """Return whether EXIF or text chunks (maybe XMP) follow the pixels; skips the pixels."""
    with png.open("rb") as file:
        file.seek(len(b"\x89PNG\r\n\x1a\n"))
        pixels_passed = False
        while len(head := file.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            pixels_passed = pixels_passed or name == b"IDAT"
            if pixels_passed and name in _ORIENTATION_CHUNKS:
                return True
            file.seek(length + len(b"CRC."), os.SEEK_CUR)
    return False


@contextmanager
def _opened(file: Path | io.BytesIO) -> Iterator[Image.Image]:
    """Open an image and read its header; errors of the `with` body become UnreadableImage."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            require_mode(image)
            yield image
    except ModeRefused as error:
        raise UnreadableImage(str(error)) from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(f"is no image of a known format ({', '.join(FORMATS)})") from error
    except Exception as error:  # Pillow's decoders raise many types for broken files
        if isinstance(error, OSError) and error.strerror:  # of the file, not its content
            raise UnreadableImage(f"cannot be read ({error.strerror})") from error
        raise UnreadableImage(f"cannot be decoded ({error})") from error
