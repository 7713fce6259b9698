"""Images of a request: a local path, a data URL or base64 text (WIRE-04)."""

import asyncio
import base64
import binascii
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from rollout_server.chat import ImageSource
from rollout_server.problems import BadRequest
from rollout_server.settings import ServerSettings

MAX_PIXELS = 64 * 10**6
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")

_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
# How base64 of each format begins: \x89PNG, \xff\xd8\xff, RIFF, BM, GIF8, II*/MM*.
_BASE64_MAGIC = ("iVBORw", "/9j/", "UklGR", "Qk", "R0lGOD", "SUkq", "TU0AK")


class MediaLoader:
    """Loads the images of a conversation, within the bounds of the settings."""

    def __init__(self, settings: ServerSettings) -> None:
        self._dirs = [directory.resolve() for directory in settings.allowed_media_dirs]

    async def load(self, sources: Sequence[ImageSource]) -> list[Image.Image]:
        """Each image as RGB, upright, in order. Raises BadRequest for the first bad one."""
        return await asyncio.to_thread(self._load, sources)

    def _load(self, sources: Sequence[ImageSource]) -> list[Image.Image]:
        return [load_image(source, self._dirs) for source in sources]

    async def close(self) -> None:
        """Nothing is loaded after this."""


def load_image(source: ImageSource, allowed_dirs: list[Path]) -> Image.Image:
    """Read and decode one image to RGB, upright; blocking.

    allowed_dirs: resolved directories local paths may point into.
    Raises BadRequest for anything but a readable image of bounded size.
    """
    try:
        return _decode(_open(source, allowed_dirs))
    except BadRequest:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # Decoders of Pillow raise any of these for broken files.
        raise BadRequest(source.where, f"the image cannot be read ({error})") from error


def _open(source: ImageSource, allowed_dirs: list[Path]) -> Image.Image:
    image = source.image
    if image.startswith("data:"):
        _, found, payload = image.partition(";base64,")
        if not found:
            raise BadRequest(source.where, "the data URL is not base64")
        return _from_base64(payload, source)
    if image.startswith(("http://", "https://")):
        raise BadRequest(source.where, "image URLs are not served; send a data URL or a path")
    if image.startswith(_BASE64_MAGIC) and _BASE64.fullmatch(image):
        return _from_base64(image, source)
    return _from_path(Path(image.removeprefix("file://")), source, allowed_dirs)


def _from_base64(payload: str, source: ImageSource) -> Image.Image:
    try:
        content = base64.b64decode(payload, validate=False)
    except binascii.Error as error:
        raise BadRequest(source.where, f"the base64 text is broken ({error})") from None
    return _identify(io.BytesIO(content), source)


def _from_path(path: Path, source: ImageSource, allowed_dirs: list[Path]) -> Image.Image:
    if not path.is_absolute():
        raise BadRequest(
            source.where, "neither an absolute path, a data URL nor base64 of an image"
        )
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(directory) for directory in allowed_dirs):
        raise BadRequest(
            source.where, f"{path} is in no directory the server was given (--allowed-media-dir)"
        )
    if not real.is_file():
        raise BadRequest(source.where, f"there is no file {path}")
    return _identify(io.BytesIO(real.read_bytes()), source)


def _identify(file: io.BytesIO, source: ImageSource) -> Image.Image:
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise BadRequest(source.where, f"not an image of a known format {FORMATS}") from None
    if image.width * image.height > MAX_PIXELS:
        raise BadRequest(
            source.where, f"{image.width}x{image.height} pixels are more than {MAX_PIXELS}"
        )
    return image


def _decode(image: Image.Image) -> Image.Image:
    """As transformers loads images: turned upright, then RGB."""
    return ImageOps.exif_transpose(image).convert("RGB")
