"""Fetch an image by URL without becoming a way into the private network (WIRE-04).

URL -> its host's addresses, resolved once -> all of them public, or the host is listed
    -> a connection to exactly such an address, under the host's name -> bounded body
    -> or a redirect: the same again, a few times
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from rollout_server.chat import ImageSource
from rollout_server.media_files import too_large
from rollout_server.problems import BadRequest

MAX_REDIRECTS = 3
MAX_FETCHES = 16
DEADLINE_S = 10.0

# Host and port to its addresses; raises OSError or UnicodeError when it has none.
Resolve = Callable[[str, int], Awaitable[list[str]]]

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
            raise BadRequest(source.where, "the URL's port is none")
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
