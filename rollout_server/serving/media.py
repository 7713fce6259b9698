"""Images of a request: a local path, a data URL, base64 text, or a URL of a listed host (WIRE-04).

    image string -> encoded bytes -> size in the header -> decoded, upright, 8-bit RGB

All calls share a memory budget for each step. Files, base64 and pixels are read in threads.
"""

import asyncio
import base64
import io
import os
import ssl
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import httpx
from PIL import Image, ImageOps, UnidentifiedImageError

from rollout_server.engines.engine_protocol import BadRequest
from rollout_server.runtime.concurrency import Budget
from rollout_server.settings.options import BYTES_PER_PIXEL, ServerSettings
from shared_contracts.images import FORMATS, ModeRefused, as_rgb, require_mode

FETCH_DEADLINE_S = 10.0

# Beginnings of each format in base64: \x89PNG, \xff\xd8\xff, RIFF, BM.
_BASE64_STARTS = ("iVBORw", "/9j/", "UklGR", "Qk")

# O_NONBLOCK: a FIFO does not block. O_NOCTTY: a terminal does not become the controlling one.
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True)
class ImageSource:
    """An image string. where: its place in the request, such as `images[0]`."""

    where: str
    image: str

    @property
    def kind(self) -> Literal["url", "inline", "path"]:
        if self.image[:8].lower().startswith(("http://", "https://")):
            return "url"
        return "inline" if self.image.startswith(("data:", *_BASE64_STARTS)) else "path"

    def fault(self, found: str) -> BadRequest:
        return BadRequest(self.where, found)


class MediaLoader:
    """Loads the images of conversations within the limits of the settings."""

    def __init__(self, settings: ServerSettings) -> None:
        self._directories = [directory.resolve() for directory in settings.allowed_media_dirs]
        self._hosts = settings.allowed_media_hosts
        self._max_images = settings.max_images_per_request
        self._max_bytes = int(settings.max_image_mib * 2**20)
        self._max_pixels = int(settings.max_image_megapixels * 10**6)
        # Always taken in this order, to avoid a deadlock.
        self._encoded = Budget(self._max_images * self._max_bytes)
        self._decoded = Budget(int(settings.max_decoded_mib * 2**20))

    @asynccontextmanager
    async def load(self, sources: Sequence[ImageSource]) -> AsyncIterator[list[Image.Image]]:
        """Yield the images as upright RGB, in order; hold their memory until the end of the block.

        Raises BadRequest for the first bad image and for too many images, and MemoryError.
        """
        if len(sources) > self._max_images:
            found = f"{len(sources)} are more than {self._max_images} (max_images_per_request)"
            raise BadRequest("images", found)
        if not sources:  # does not wait for memory
            yield []
            return
        async with AsyncExitStack() as held:
            async with self._encoded.take(len(sources) * self._max_bytes):
                encoded = [await self._read(source) for source in sources]
                needed = BYTES_PER_PIXEL * sum(pixels for _, pixels in encoded)
                if needed > self._decoded.total:
                    raise BadRequest(
                        "images",
                        f"decoded they take {needed / 2**20:.0f} MiB, and the server has "
                        f"{self._decoded.total / 2**20:g} (max_decoded_mib)",
                    )
                await held.enter_async_context(self._decoded.take(needed))
                decoded = [
                    await asyncio.to_thread(decode_image, content, source)
                    for (content, _), source in zip(encoded, sources, strict=True)
                ]
            del encoded
            yield decoded

    async def _read(self, source: ImageSource) -> tuple[bytes, int]:
        """Return the encoded image, and the pixels by its header. Raises BadRequest."""
        fetched = None
        if source.kind == "url":
            fetched = await fetch(source, self._hosts, self._max_bytes)
        return await asyncio.to_thread(self._inspect, source, fetched)

    def _inspect(self, source: ImageSource, fetched: bytes | None) -> tuple[bytes, int]:
        """Do the blocking part of `_read`; reading stops soon after `max_bytes`."""
        if fetched is not None:
            content = fetched
        elif source.kind == "inline":
            content = decode_base64(source, self._max_bytes)
        else:
            content = read_media_file(source, self._directories, self._max_bytes)
        if len(content) > self._max_bytes:
            limit = f"{self._max_bytes / 2**20:g} MiB (max_image_mib)"
            raise source.fault(f"the image is larger than {limit}")
        return content, count_pixels(content, source, self._max_pixels)


# --- encoded bytes


def read_media_file(source: ImageSource, directories: Sequence[Path], max_bytes: int) -> bytes:
    """Read a file below one of `directories` (resolved), at most `max_bytes + 1`; blocking.

    Checks the real path again after the open, as the path may have become a link. The error for a
    path outside of `directories` does not depend on whether the file exists. Raises BadRequest.
    """
    path = source.image.removeprefix("file://")
    if not path.startswith("/"):
        raise source.fault("neither an absolute path, a data URL nor base64 of an image")
    try:
        real = os.path.realpath(path)
        _require_inside(real, directories, source)
        with open(real, "rb", opener=lambda name, _: os.open(name, _OPEN_FLAGS)) as file:
            _require_inside(os.readlink(f"/proc/self/fd/{file.fileno()}"), directories, source)
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read(max_bytes + 1)
    except (OSError, ValueError):  # ValueError: a NUL or a lone surrogate
        raise source.fault("there is no readable file at this path") from None
    raise source.fault("the path is not a regular file")


def _require_inside(real: str, directories: Sequence[Path], source: ImageSource) -> None:
    if not any(Path(real).is_relative_to(directory) for directory in directories):
        raise source.fault("the path is in no allowed folder of the server (--allowed-media-dir)")


def decode_base64(source: ImageSource, max_bytes: int) -> bytes:
    """Decode base64 text or a data URL, at most `max_bytes + 3`; blocking. Raises BadRequest."""
    text = source.image
    if text.startswith("data:"):
        _, found, text = text.partition(";base64,")
        if not found:
            raise source.fault("the data URL is not base64")
    try:
        packed = text.encode("ascii").translate(None, b" \t\r\n")
        return base64.b64decode(packed[: 4 * (max_bytes // 3 + 1)], validate=True)
    except ValueError as error:
        raise source.fault(f"the base64 text is broken ({error})") from None


def listed_url(source: ImageSource, hosts: Sequence[str]) -> httpx.URL:
    """Return the URL if `hosts` has its host; raises BadRequest.

    hosts: `name` for the default port of http and https, `name:port` for another port.
    """
    try:
        url = httpx.URL(source.image)
    except (httpx.InvalidURL, UnicodeError):
        raise source.fault("the URL is malformed") from None
    host = url.netloc.decode("ascii")  # without a default port
    if url.userinfo or host not in map(str.lower, hosts):
        raise source.fault(
            f"the server fetches no image from {host[:253]!r} (--allowed-media-host) "
            "and none with a user name; send a data URL or a path"
        )
    return url


async def fetch(
    source: ImageSource,
    hosts: Sequence[str],
    max_bytes: int,
    deadline_s: float = FETCH_DEADLINE_S,
) -> bytes:
    """Fetch a URL of a listed host; reading stops after `max_bytes`. Raises BadRequest.

    deadline_s: from the name lookup to the last byte.
    """
    url = listed_url(source, hosts)
    try:
        async with (
            asyncio.timeout(deadline_s),
            # No proxy and no .netrc of the environment. A new client has no cookies.
            httpx.AsyncClient(verify=_tls(), trust_env=False, timeout=None) as client,
            client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as answer,
        ):
            if answer.status_code != 200:
                found = f"answered {answer.status_code}, not 200 (redirects are not followed)"
                raise source.fault(f"the URL's host {found}")
            content = bytearray()
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > max_bytes:
                    break
            return bytes(content)
    except TimeoutError:
        found = f"the URL's host did not send the image within {deadline_s:g} s"
    except httpx.HTTPError as error:
        found = f"the image cannot be fetched ({type(error).__name__})"
    raise source.fault(found)


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()


# --- pixels


def count_pixels(content: bytes, source: ImageSource, max_pixels: int) -> int:
    """Return width times height by the header; raises BadRequest for 0 and for too many."""
    with _open_image(content, source) as image:
        width, height = image.size
    if 0 < width * height <= max_pixels:
        return width * height
    raise source.fault(
        f"{width}x{height} pixels are none or more than {max_pixels / 10**6:g} million "
        "(max_image_megapixels)"
    )


def decode_image(content: bytes, source: ImageSource) -> Image.Image:
    """Return the first frame as upright RGB; blocking. Raises BadRequest and MemoryError.

    Memory use depends on the header: call `count_pixels` first.
    """
    with _open_image(content, source) as image:
        require_mode(image)
        return as_rgb(ImageOps.exif_transpose(image))


@contextmanager
def _open_image(content: bytes, source: ImageSource) -> Iterator[Image.Image]:
    """Open an image and read its header; errors of the `with` body become BadRequest, too."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            yield image
    except MemoryError:
        raise
    except ModeRefused as error:
        raise source.fault(f"the image {error}") from None
    except UnidentifiedImageError:
        raise source.fault(f"not an image of a known format {FORMATS}") from None
    except Exception as error:  # Pillow's decoders raise many types for broken files
        raise source.fault(f"the image cannot be read ({error})") from error
