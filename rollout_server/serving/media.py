"""Images of a request: a local path, a data URL, base64 text or a URL (WIRE-04).

source -> encoded bytes -> format and pixels looked at -> decoded, upright, 8-bit RGB

The memory of each step is taken before it from a budget that all callers share. What a request
names several times is read and decoded once. Whatever may be large happens in threads; only URLs
are fetched on the event loop: the addresses of the host, resolved once, must be public (or the
host be listed), and the connection goes to exactly such an address under the host's name.
"""

import asyncio
import base64
import binascii
import io
import ipaddress
import os
import re
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import BinaryIO

import httpx
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from rollout_server.runtime.concurrency import Budget
from rollout_server.runtime.refusals import BadRequest
from rollout_server.settings.options import (
    DECODING_BYTES_PER_PIXEL,
    RENDERING_BYTES_PER_PIXEL,
    ServerSettings,
)
from shared_contracts.images import FORMATS, ModeRefused, as_rgb, require_mode


@dataclass(frozen=True)
class ImageSource:
    """where: the spot in the request the string stands at, such as `images[0]`."""

    where: str
    image: str


# --- local files


# A FIFO or a device must neither block the open nor become our terminal.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


def read_media_file(source: ImageSource, directories: Sequence[Path], max_bytes: int) -> bytes:
    """The content of the file `source` names; blocking. Raises as `media_file` does."""
    with media_file(source, directories, max_bytes) as file:
        content = file.read(max_bytes + 1)  # it may have grown meanwhile
    if len(content) > max_bytes:
        raise BadRequest(source.where, too_large(max_bytes))
    return content


@contextmanager
def media_file(
    source: ImageSource, directories: Sequence[Path], max_bytes: int
) -> Iterator[BinaryIO]:
    """The open file that `source` names by its absolute path; blocking.

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
    except OSError:
        raise BadRequest(source.where, "there is no readable file at this path") from None
    try:
        _require_inside(os.readlink(f"/proc/self/fd/{descriptor}"), directories, source)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise BadRequest(source.where, "the path is not a regular file")
        if found.st_size > max_bytes:
            raise BadRequest(source.where, too_large(max_bytes))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def too_large(max_bytes: int) -> str:
    """What a refusal says of an image beyond the bound, wherever it came from."""
    return f"the image is larger than {max_bytes / 2**20:g} MiB (max_image_mib)"


def _real_path(path: str, source: ImageSource) -> str:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # a NUL, a lone surrogate
        raise BadRequest(source.where, "this is not a valid path") from None


def _require_inside(real: str, directories: Sequence[Path], source: ImageSource) -> None:
    if not any(Path(real).is_relative_to(directory) for directory in directories):
        raise BadRequest(
            source.where,
            "the path is in no allowed folder of the server (--allowed-media-dir)",
        )


# --- URLs


MAX_REDIRECTS = 3
MAX_FETCHES = 16
DEADLINE_S = 10.0

# Host and port to its addresses; raises OSError or UnicodeError when it has none.
Resolve = Callable[[str, int], Awaitable[list[str]]]

# Not everyone's, whatever Python's tables say, which follow the registries late: protocol
# assignments (RFC 6890), shared space (RFC 6598), benchmarks (RFC 2544), what was class
# E and 6to4 relays (RFC 7526), the services of clouds for their guests, and documentation
# (RFC 9637).
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",
            "100.64.0.0/10",
            "168.63.129.16/32",
            "169.254.0.0/16",
            "192.0.0.0/24",
            "192.88.99.0/24",
            "198.18.0.0/15",
            "240.0.0.0/4",
            "2001::/23",
            "2001:db8::/32",
            "3fff::/20",
            "5f00::/16",
        ),
    )
)
_IPV6_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class MediaFetcher:
    """One HTTP client for the server's life.

    allowed_hosts: fetched from although their address is private.
    deadline_s: for one image, from the resolving of its host to its last byte.
    """

    def __init__(
        self,
        allowed_hosts: Sequence[str],
        max_bytes: int,
        resolve: Resolve | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._allowed_hosts = {_host_key(host) for host in allowed_hosts}
        self._max_bytes = max_bytes
        self._resolver = Resolver()
        self._resolve = resolve or self._resolver.resolve
        self._deadline_s = deadline_s
        self._places = asyncio.Semaphore(MAX_FETCHES)
        self._client = _client(deadline_s)

    async def close(self) -> None:
        self._resolver.close()
        await self._client.aclose()

    async def fetch(self, source: ImageSource) -> bytes:
        """What the URL in `source` answers, at most `max_bytes`. Raises BadRequest."""
        async with self._places:
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await self._follow(source)
            except TimeoutError:
                reason = f"the image was not there within {self._deadline_s:g} s"
            except (httpx.InvalidURL, UnicodeError):
                reason = "the URL is malformed"
            except httpx.HTTPError as error:
                reason = f"the image cannot be fetched ({type(error).__name__})"
        raise BadRequest(source.where, reason)

    async def _follow(self, source: ImageSource) -> bytes:
        url = httpx.URL(source.image)
        for _ in range(1 + MAX_REDIRECTS):
            answer = await self._get(url, source)
            if isinstance(answer, bytes):
                return answer
            url = url.join(answer)
        raise BadRequest(source.where, f"more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: httpx.URL, source: ImageSource) -> bytes | str:
        """The body, or where the host redirects to."""
        addresses = await self._addresses(url, source)
        for address in addresses[:-1]:
            try:
                return await self._get_from(address, url, source)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._get_from(addresses[-1], url, source)

    async def _addresses(self, url: httpx.URL, source: ImageSource) -> list[str]:
        """Where `url` may be fetched from; at least one."""
        if url.scheme not in ("http", "https") or not url.host:
            raise BadRequest(source.where, "only http and https URLs with a host are fetched")
        if url.userinfo:
            raise BadRequest(source.where, "URLs with a user name are not fetched")
        port = _port_of(url)
        if not 0 < port < 2**16:
            raise BadRequest(source.where, "the URL has no valid port")
        try:
            addresses = await self._resolve(url.host, port)
        except (OSError, UnicodeError):
            raise BadRequest(source.where, "the URL's host has no address") from None
        if _host_key(url.host) not in self._allowed_hosts and not all(map(is_public, addresses)):
            raise BadRequest(
                source.where, "the URL's host is not a public one (--allowed-media-host)"
            )
        return addresses

    async def _get_from(self, address: str, url: httpx.URL, source: ImageSource) -> bytes | str:
        request = self._client.build_request(
            "GET",
            url.copy_with(host=address),
            headers={"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity"},
            extensions={"sni_hostname": url.raw_host.decode("ascii")},
        )
        answer = await self._client.send(request, stream=True)
        try:
            if answer.has_redirect_location:
                return answer.headers["Location"]
            if answer.status_code != 200:
                raise BadRequest(source.where, f"the URL's host answered {answer.status_code}")
            return await self._read(answer, source)
        finally:
            await answer.aclose()

    async def _read(self, answer: httpx.Response, source: ImageSource) -> bytes:
        """The bytes as sent: nothing is unpacked, so what is counted is all there is."""
        content = bytearray()
        async for piece in answer.aiter_raw():
            content += piece
            if len(content) > self._max_bytes:
                raise BadRequest(source.where, too_large(self._max_bytes))
        return bytes(content)


class Resolver:
    """Threads of its own for name lookups: a slow name server must not hold up the others."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4, "resolve")

    async def resolve(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _look_up, host, port)
        return list(dict.fromkeys(found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def is_public(address: str) -> bool:
    """Whether anyone on the internet means the same host by `address`.

    An IPv6 address that stands for an IPv4 one is judged by that.
    """
    ip = ipaddress.ip_address(address)
    if any(ip in network for network in _NOT_PUBLIC):
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast
    inside = ip.ipv4_mapped or ip.sixtofour
    if ip in _NAT64:
        inside = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if inside is not None:
        return is_public(str(inside))
    return ip in _IPV6_UNICAST and ip.is_global


def _client(deadline_s: float) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        trust_env=False,  # a proxy would resolve the name anew
        follow_redirects=False,
        timeout=httpx.Timeout(deadline_s, connect=deadline_s / 3),
        # Connections are not kept: one to an address would be taken for another host there.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        # Cookies are stored by address and would reach another host there, too.
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
    )


def _port_of(url: httpx.URL) -> int:
    if url.port is not None:
        return url.port
    return 443 if url.scheme == "https" else 80


def _host_key(host: str) -> str:
    return host.lower().rstrip(".")


# --- headers


_TILE_WIDTH, _TILE_LENGTH = 322, 323  # TIFF 6.0, section 15
_SAMPLES_PER_PIXEL, _BITS_PER_SAMPLE = 277, 258


@dataclass(frozen=True)
class ImageCost:
    """width, height: of the canvas, or of a TIFF's tile where that is larger.

    decoding: bytes, once; rendering: bytes, for every place of a request that names it.
    """

    width: int
    height: int
    decoding: int
    rendering: int


def cost_of(content: bytes) -> ImageCost:
    """What decoding an image takes, by its header; raises what Pillow raises for a bad one.

    Pillow makes the whole canvas of a WebP when it opens the file, and libtiff a whole tile,
    however small the image in it is: neither the size that Pillow gives nor its opening is safe.
    """
    width, height = webp_canvas(content) or (0, 0)
    bytes_per_pixel = DECODING_BYTES_PER_PIXEL
    if not width:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if isinstance(image, TiffImagePlugin.TiffImageFile):
                width = max(width, image.tag_v2.get(_TILE_WIDTH, 0))
                height = max(height, image.tag_v2.get(_TILE_LENGTH, 0))
                bits = max(image.tag_v2.get(_BITS_PER_SAMPLE, (1,)))
                samples = image.tag_v2.get(_SAMPLES_PER_PIXEL, 1)
                bytes_per_pixel += -(-bits * samples // 8)
    pixels = width * height
    return ImageCost(width, height, bytes_per_pixel * pixels, RENDERING_BYTES_PER_PIXEL * pixels)


def webp_canvas(content: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file (RFC 9649); None of what does not begin as one."""
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP":
        return None
    kind, body = content[12:16], content[20:30].ljust(10, b"\0")
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L":
        packed = int.from_bytes(body[1:5], "little")
        return 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF)
    width, height = (int.from_bytes(body[at : at + 2], "little") & 0x3FFF for at in (6, 8))
    return max(width, 1), max(height, 1)


# How base64 of each format begins: \x89PNG, \xff\xd8\xff, RIFF, BM, GIF8, II*/MM*.
_BASE64_MAGIC = ("iVBORw", "/9j/", "UklGR", "Qk", "R0lGOD", "SUkq", "TU0AK")
_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/=\s]", re.ASCII)


class MediaLoader:
    """Loads the images of a conversation, within the bounds of the settings."""

    def __init__(self, settings: ServerSettings) -> None:
        self._directories = [directory.resolve() for directory in settings.allowed_media_dirs]
        self._max_images = settings.max_images_per_request
        self._max_bytes = int(settings.max_image_mib * 2**20)
        self._max_pixels = int(settings.max_image_megapixels * 10**6)
        # One request fits in. Encoded bytes are held while decoded ones are waited for, and
        # never the other way round.
        self._encoded = Budget(self._max_images * self._max_bytes)
        self._decoded = Budget(int(settings.max_decoded_mib * 2**20))
        self._fetcher = (
            MediaFetcher(settings.allowed_media_hosts, self._max_bytes)
            if settings.allow_media_urls
            else None
        )

    @asynccontextmanager
    async def load(self, sources: Sequence[ImageSource]) -> AsyncIterator[list[Image.Image]]:
        """Each image as RGB, upright, in order; their memory counts until this is left.

        Raises BadRequest for the first bad one, and MemoryError.
        """
        self._require_few(sources)
        if not sources:  # a text needs no thread
            yield []
            return
        distinct: dict[str, ImageSource] = {}
        for source in sources:
            distinct.setdefault(source.image, source)
        async with AsyncExitStack() as until_left:
            async with self._encoded.take(sum(map(self._most_encoded, distinct))):
                contents = {image: await self._content(distinct[image]) for image in distinct}
                needed = await asyncio.to_thread(self._needed, contents, sources)
                await until_left.enter_async_context(self._decoded.take(needed))
                decoded = {
                    image: await asyncio.to_thread(decode_image, content, distinct[image])
                    for image, content in contents.items()
                }
            del contents
            yield [decoded[source.image] for source in sources]

    async def check(self, sources: Sequence[ImageSource]) -> None:
        """Raises BadRequest for what shows before an image is read.

        That is too many images, a URL that is not fetched, and a file that is not there, lies in
        no allowed folder or is too large.
        """
        self._require_few(sources)
        files = []
        for source in sources:
            if _is_url(source):
                self._require_fetcher(source)
            elif not source.image.startswith(("data:", *_BASE64_MAGIC)):
                files.append(source)
        if files:
            await asyncio.to_thread(self._require_files, files)

    def _require_few(self, sources: Sequence[ImageSource]) -> None:
        if len(sources) > self._max_images:
            raise BadRequest(
                "images",
                f"{len(sources)} are more than {self._max_images} (max_images_per_request)",
            )

    def _require_files(self, sources: Sequence[ImageSource]) -> None:
        for source in sources:
            with media_file(source, self._directories, self._max_bytes):
                pass

    def _require_fetcher(self, source: ImageSource) -> MediaFetcher:
        if self._fetcher is None:
            raise BadRequest(
                source.where,
                "image URLs are not fetched (--allow-media-urls); send a data URL or a path",
            )
        return self._fetcher

    async def close(self) -> None:
        """Nothing is loaded after this."""
        if self._fetcher is not None:
            await self._fetcher.close()

    def _most_encoded(self, image: str) -> int:
        """Bytes of what an image string stands for, as far as the string tells."""
        return min(len(image), self._max_bytes) if image.startswith("data:") else self._max_bytes

    def _needed(self, contents: dict[str, bytes], sources: Sequence[ImageSource]) -> int:
        """Bytes that decoding and rendering take; looks at headers. Raises BadRequest."""
        costs: dict[str, ImageCost] = {}
        for source in sources:
            if source.image not in costs:
                content = contents[source.image]
                costs[source.image] = look_at(content, source, self._max_pixels)
        needed = sum(cost.decoding for cost in costs.values())
        needed += sum(costs[source.image].rendering for source in sources)
        if needed > self._decoded.total:
            raise BadRequest(
                "images",
                f"decoded they take {needed / 2**20:.0f} MiB, and the server has "
                f"{self._decoded.total / 2**20:g} (max_decoded_mib)",
            )
        return needed

    async def _content(self, source: ImageSource) -> bytes:
        """The encoded image."""
        if _is_url(source):
            return await self._require_fetcher(source).fetch(source)
        return await asyncio.to_thread(self._read, source)

    def _read(self, source: ImageSource) -> bytes:
        """What is in the text or in the file it names; blocking."""
        image = source.image
        if image.startswith("data:"):
            _, found, payload = image.partition(";base64,")
            if not found:
                raise BadRequest(source.where, "the data URL is not base64")
            return _decode_base64(payload, source, self._max_bytes)
        if image.startswith(_BASE64_MAGIC) and not _NOT_BASE64.search(image):
            return _decode_base64(image, source, self._max_bytes)
        return read_media_file(source, self._directories, self._max_bytes)


def _is_url(source: ImageSource) -> bool:
    return source.image[:8].lower().startswith(("http://", "https://"))


def look_at(content: bytes, source: ImageSource, max_pixels: int) -> ImageCost:
    """What an image takes, by its header. Raises BadRequest for one of too many pixels, or none."""
    with _told(source):
        cost = cost_of(content)
    if 0 < cost.width * cost.height <= max_pixels:
        return cost
    raise BadRequest(
        source.where,
        f"{cost.width}x{cost.height} pixels are none or more than "
        f"{max_pixels / 10**6:g} million (max_image_megapixels)",
    )


def decode_image(content: bytes, source: ImageSource) -> Image.Image:
    """The first frame as RGB, upright; blocking. Raises BadRequest and MemoryError.

    Whatever the file says that it takes is taken: `look_at` comes first.
    """
    with _told(source), Image.open(io.BytesIO(content), formats=FORMATS) as image:
        require_mode(image)
        return as_rgb(ImageOps.exif_transpose(image))


@contextmanager
def _told(source: ImageSource) -> Iterator[None]:
    """Turns what Pillow raises into BadRequest."""
    try:
        yield
    except MemoryError:
        raise
    except ModeRefused as error:
        raise BadRequest(source.where, f"the image {error}") from None
    except UnidentifiedImageError:
        raise BadRequest(source.where, f"not an image of a known format {FORMATS}") from None
    except Exception as error:  # Pillow's decoders raise nearly anything for broken files
        why = _MEMORY_ADDRESS.sub("", str(error))
        raise BadRequest(source.where, f"the image cannot be read ({why})") from error


def _decode_base64(text: str, source: ImageSource, max_bytes: int) -> bytes:
    if len(text) * 3 // 4 > max_bytes + 2:  # up to two characters pad
        raise BadRequest(source.where, too_large(max_bytes))
    if _NOT_BASE64.search(text):
        raise BadRequest(source.where, "the base64 text holds other characters")
    try:
        return base64.b64decode(text)
    except binascii.Error as error:
        raise BadRequest(source.where, f"the base64 text is broken ({error})") from None
