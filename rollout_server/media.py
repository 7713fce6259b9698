"""Images of a request: a local path, a data URL, base64 text or a URL (WIRE-04).

source -> encoded bytes, bounded -> format and pixels looked at -> decoded, upright, RGB

Whatever may be large happens in threads; only URLs are fetched on the event loop.
"""

import asyncio
import base64
import binascii
import io
import re
from collections.abc import Sequence

from PIL import Image, ImageOps, UnidentifiedImageError

from rollout_server.chat import ImageSource
from rollout_server.media_files import read_media_file, too_large
from rollout_server.media_urls import MediaFetcher
from rollout_server.problems import BadRequest
from rollout_server.settings import ServerSettings

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")

# How base64 of each format begins: \x89PNG, \xff\xd8\xff, RIFF, BM, GIF8, II*/MM*.
_BASE64_MAGIC = ("iVBORw", "/9j/", "UklGR", "Qk", "R0lGOD", "SUkq", "TU0AK")
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/=\s]", re.ASCII)


class MediaLoader:
    """Loads the images of a conversation, within the bounds of the settings."""

    def __init__(self, settings: ServerSettings) -> None:
        self._directories = [directory.resolve() for directory in settings.allowed_media_dirs]
        self._max_images = settings.max_images_per_request
        self._max_bytes = int(settings.max_image_mib * 2**20)
        self._max_pixels = int(settings.max_image_megapixels * 10**6)
        self._fetcher = (
            MediaFetcher(settings.allowed_media_hosts, self._max_bytes)
            if settings.allow_media_urls
            else None
        )

    async def load(self, sources: Sequence[ImageSource]) -> list[Image.Image]:
        """Each image as RGB, upright, in order. Raises BadRequest for the first bad one."""
        if len(sources) > self._max_images:
            raise BadRequest(
                "images",
                f"{len(sources)} are more than {self._max_images} (max_images_per_request)",
            )
        return [await self._load(source) for source in sources]

    async def close(self) -> None:
        """Nothing is loaded after this."""
        if self._fetcher is not None:
            await self._fetcher.close()

    async def _load(self, source: ImageSource) -> Image.Image:
        if not source.image[:8].lower().startswith(("http://", "https://")):
            return await asyncio.to_thread(self._read_and_decode, source)
        if self._fetcher is None:
            raise BadRequest(
                source.where,
                "image URLs are not fetched (--allow-media-urls); send a data URL or a path",
            )
        content = await self._fetcher.fetch(source)
        return await asyncio.to_thread(decode_image, content, source, self._max_pixels)

    def _read_and_decode(self, source: ImageSource) -> Image.Image:
        return decode_image(self._read(source), source, self._max_pixels)

    def _read(self, source: ImageSource) -> bytes:
        """The encoded image that is in the text or in the file it names."""
        image = source.image
        if image.startswith("data:"):
            _, found, payload = image.partition(";base64,")
            if not found:
                raise BadRequest(source.where, "the data URL is not base64")
            return _decode_base64(payload, source, self._max_bytes)
        if image.startswith(_BASE64_MAGIC) and not _NOT_BASE64.search(image):
            return _decode_base64(image, source, self._max_bytes)
        return read_media_file(source, self._directories, self._max_bytes)


def decode_image(content: bytes, source: ImageSource, max_pixels: int) -> Image.Image:
    """The first frame as RGB, upright; blocking. Raises BadRequest."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        if 0 < image.width * image.height <= max_pixels:
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise BadRequest(source.where, f"not an image of a known format {FORMATS}") from None
    except Exception as error:  # Pillow's decoders raise nearly anything for broken files
        raise BadRequest(source.where, f"the image cannot be read ({error})") from error
    raise BadRequest(
        source.where,
        f"{image.width}x{image.height} pixels are none or more than "
        f"{max_pixels / 10**6:g} million (max_image_megapixels)",
    )


def _decode_base64(text: str, source: ImageSource, max_bytes: int) -> bytes:
    if len(text) * 3 // 4 > max_bytes + 2:  # up to two characters pad
        raise BadRequest(source.where, too_large(max_bytes))
    if _NOT_BASE64.search(text):
        raise BadRequest(source.where, "the base64 text holds other characters")
    try:
        return base64.b64decode(text)
    except binascii.Error as error:
        raise BadRequest(source.where, f"the base64 text is broken ({error})") from None
