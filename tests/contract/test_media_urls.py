"""Images by URL: from public hosts and listed ones, within bounds, and from nowhere else."""

import asyncio
import io
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from PIL import Image

from rollout_server.runtime.refusals import BadRequest
from rollout_server.serving.media import ImageSource, MediaFetcher, MediaLoader, is_public
from rollout_server.settings.options import ServerSettings

LISTED = "images.example"
MAX_BYTES = 100_000


def _red() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (255, 0, 0)).save(file, "PNG")
    return file.getvalue()


RED = _red()


class ImageHost(ThreadingHTTPServer):
    """A web server on 127.0.0.1 that notes every request it gets, as (host, path)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str]] = []
        self.cookies: list[str] = []

    def handle_error(self, *_: Any) -> None:
        """Clients hang up on purpose."""


class _Handler(BaseHTTPRequestHandler):
    server: ImageHost

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.server.seen.append((self.headers["Host"], url.path))
        self.server.cookies += self.headers.get_all("Cookie", [])
        getattr(self, f"answer_{url.path.strip('/')}")(parse_qs(url.query))

    def answer_red(self, _: dict[str, list[str]]) -> None:
        self._begin(200, {"Content-Length": str(len(RED)), "Set-Cookie": "who=me"})
        self.wfile.write(RED)

    def answer_redirect(self, query: dict[str, list[str]]) -> None:
        self._begin(302, {"Location": query["to"][0]})

    def answer_again(self, query: dict[str, list[str]]) -> None:
        """As many redirects to this path as it is told, then the image."""
        left = int(query["left"][0])
        self._begin(301, {"Location": f"/again?left={left - 1}" if left > 1 else "/red"})

    def answer_missing(self, _: dict[str, list[str]]) -> None:
        self._begin(404, {})
        self.wfile.write(b"a secret of this host")

    def answer_text(self, _: dict[str, list[str]]) -> None:
        self._begin(200, {})
        self.wfile.write(b"no image")

    def answer_endless(self, _: dict[str, list[str]]) -> None:
        self._begin(200, {})
        while True:
            self.wfile.write(bytes(10_000))

    def answer_packed(self, _: dict[str, list[str]]) -> None:
        self._begin(200, {"Content-Encoding": "gzip"})
        self.wfile.write(RED)

    def answer_drop_by_drop(self, _: dict[str, list[str]]) -> None:
        self._begin(200, {"Content-Length": str(len(RED))})
        for byte in RED:
            self.wfile.write(bytes([byte]))
            time.sleep(0.05)

    def answer_silence(self, _: dict[str, list[str]]) -> None:
        time.sleep(5)

    def answer_cut(self, _: dict[str, list[str]]) -> None:
        self._begin(200, {"Content-Length": str(len(RED))})
        self.wfile.write(RED[:20])

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def serving(host: ImageHost) -> Iterator[ImageHost]:
    thread = Thread(target=host.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield host
    finally:
        host.shutdown()
        thread.join()
        host.server_close()


@pytest.fixture
def web() -> Iterator[ImageHost]:
    with serving(ImageHost()) as host:
        yield host


@dataclass
class Names:
    """A name service for the test; it counts what it is asked."""

    addresses: dict[str, list[str]] = field(default_factory=lambda: {LISTED: ["127.0.0.1"]})
    asked: list[str] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.addresses:
            raise OSError("no such host")
        return self.addresses[host]


def fetch(
    url: str, names: Names | None = None, listed: Sequence[str] = (LISTED,), **bounds: Any
) -> bytes:
    """names: None asks the system's name service."""
    resolve = None if names is None else names.resolve

    async def once() -> bytes:
        fetcher = MediaFetcher(listed, MAX_BYTES, resolve, **bounds)
        try:
            return await fetcher.fetch(ImageSource("images[0]", url))
        finally:
            await fetcher.close()

    return asyncio.run(once())


def refusal(url: str, *arguments: Any, **options: Any) -> str:
    with pytest.raises(BadRequest) as error:
        fetch(url, *arguments, **options)
    assert error.value.where == "images[0]"
    return error.value.found


def at(web: ImageHost, path: str, host: str = LISTED) -> str:
    return f"http://{host}:{web.server_port}{path}"


# --- what is fetched


@pytest.mark.req("WIRE-04")
def test_a_listed_host_is_fetched_from_although_its_address_is_private(web: ImageHost) -> None:
    names = Names()
    assert fetch(at(web, "/red"), names) == RED
    assert web.seen == [(f"{LISTED}:{web.server_port}", "/red")]
    for spelling in (LISTED.upper(), f"{LISTED}."):
        names.addresses[spelling.lower()] = ["127.0.0.1"]
        assert fetch(at(web, "/red", spelling), names) == RED


@pytest.mark.req("WIRE-04")
def test_a_url_is_loaded_as_an_image_where_the_server_was_told_to(web: ImageHost) -> None:
    def load(path: str, **settings: Any) -> Image.Image:
        async def once() -> Image.Image:
            loader = MediaLoader(ServerSettings(model=Path("/m"), device="cpu", **settings))
            try:
                async with loader.load([ImageSource("images[0]", path)]) as (image,):
                    return image
            finally:
                await loader.close()

        return asyncio.run(once())

    url = at(web, "/red", "127.0.0.1")
    for spelling in (url, url.replace("http", "HTTP")):
        with pytest.raises(BadRequest, match="--allow-media-urls"):
            load(spelling)
        with pytest.raises(BadRequest, match="--allowed-media-host"):
            load(spelling, allow_media_urls=True)
        told = {"allow_media_urls": True, "allowed_media_hosts": ("127.0.0.1",)}
        assert load(spelling, **told).getpixel((1, 1)) == (255, 0, 0)
        with pytest.raises(BadRequest, match="max_image_mib"):
            load(spelling, max_image_mib=1e-5, **told)
    with pytest.raises(BadRequest, match="known format"):
        load(at(web, "/text", "127.0.0.1"), **told)


@pytest.mark.req("WIRE-04")
def test_the_next_address_of_a_host_is_tried_when_one_cannot_be_reached(web: ImageHost) -> None:
    names = Names({LISTED: ["127.0.0.77", "127.0.0.1"]})
    assert fetch(at(web, "/red"), names) == RED
    assert names.asked == [LISTED]


def test_redirects_are_followed_a_few_times(web: ImageHost) -> None:
    assert fetch(at(web, "/again?left=3"), Names()) == RED
    assert len(web.seen) == 4
    assert "3 redirects" in refusal(at(web, "/again?left=4"), Names())


@pytest.mark.req("SRV-06")
def test_no_cookie_of_one_host_reaches_another(web: ImageHost) -> None:
    names = Names({LISTED: ["127.0.0.1"], "other.example": ["127.0.0.1"]})

    async def both() -> None:
        fetcher = MediaFetcher((LISTED, "other.example"), MAX_BYTES, names.resolve)
        for host in (LISTED, "other.example"):
            await fetcher.fetch(ImageSource("images[0]", at(web, "/red", host)))
        await fetcher.close()

    asyncio.run(both())
    assert len(web.seen) == 2
    assert web.cookies == []


# --- what is not


PRIVATE = (
    "127.0.0.1",
    "localhost",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "0177.0.0.1",
    "127.1",
    "0",
    "0.0.0.0",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[64:ff9b::127.0.0.1]",
    "[2002:7f00:1::]",
    "[::127.0.0.1]",
    "[fe80::1]",
    "[fd00::1]",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.0.1",
    "100.64.0.1",
    "169.254.169.254",
    "224.0.0.1",
    "255.255.255.255",
)


@pytest.mark.req("WIRE-04", "SRV-06")
@pytest.mark.parametrize("host", PRIVATE)
def test_a_private_address_is_refused_however_it_is_spelled(web: ImageHost, host: str) -> None:
    told = refusal(at(web, "/red", host))
    assert "not a public one" in told or "malformed" in told
    assert web.seen == []


@pytest.mark.req("WIRE-04", "SRV-06")
@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["127.0.0.1", "8.8.8.8"], ["::ffff:10.0.0.1"]],
)
def test_a_name_with_any_private_address_is_refused(web: ImageHost, addresses: list[str]) -> None:
    names = Names({"evil.example": addresses})
    told = refusal(at(web, "/red", "evil.example"), names)
    assert "not a public one" in told
    assert not any(address in told for address in addresses)
    assert web.seen == []


@pytest.mark.req("WIRE-04", "SRV-06")
def test_a_name_is_looked_up_once_and_that_address_is_connected_to(web: ImageHost) -> None:
    """The name means nothing to this machine: only the answer that was checked can serve."""
    names = Names()
    assert fetch(at(web, "/red"), names) == RED
    assert names.asked == [LISTED]


@pytest.mark.req("WIRE-04", "SRV-06")
@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/red",
        "http://2130706433:{port}/red",
        "//127.0.0.1:{port}/red",
        "http://[::ffff:127.0.0.1]:{port}/red",
        "http://evil.example:{port}/red",
        "http://images.example.evil.example:{port}/red",
    ],
)
def test_a_redirect_to_a_private_address_is_refused(web: ImageHost, target: str) -> None:
    names = Names({LISTED: ["127.0.0.1"], "127.0.0.1": ["127.0.0.1"]})
    for name in ("2130706433", "::ffff:127.0.0.1", "evil.example"):
        names.addresses[name] = ["127.0.0.1"]
    names.addresses["images.example.evil.example"] = ["127.0.0.1"]
    target = target.format(port=web.server_port)
    assert "not a public one" in refusal(at(web, f"/redirect?to={target}"), names)
    assert [path for _, path in web.seen] == ["/redirect"]


@pytest.mark.req("WIRE-04")
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("file:///etc/passwd", "only http and https"),
        ("ftp://images.example/a.png", "only http and https"),
        ("http://user:word@images.example:{port}/red", "user name"),
        ("http://images.example:99999/a.png", "no valid port"),
        ("http://images.example:0/a.png", "no valid port"),
        ("http://[::1/a.png", "malformed"),
    ],
)
def test_other_kinds_of_url_are_refused_also_as_a_redirect(
    web: ImageHost, target: str, reason: str
) -> None:
    assert reason in refusal(target.format(port=web.server_port), Names())
    assert web.seen == []
    refusal(at(web, f"/redirect?to={target.format(port=web.server_port)}"), Names())
    assert [path for _, path in web.seen] == ["/redirect"]


@pytest.mark.req("WIRE-05")
@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///a.png",
        "https://?",
        "http://nowhere.example/",
        f"http://{'a' * 300}.example/",
        f"http://{'a.' * 40000}/",
        "http://a b/",
        "http://\ud800/",
        "http://images.example/\0",
        "http://\u2460\u2461.example/",
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    refusal(url, Names())


@pytest.mark.req("SRV-06")
def test_what_a_host_says_in_an_error_is_not_passed_on(web: ImageHost) -> None:
    told = refusal(at(web, "/missing?key=value"), Names())
    assert told == "the URL's host answered 404"


# --- bounds


@pytest.mark.req("WIRE-04")
def test_a_body_is_counted_while_it_comes(web: ImageHost) -> None:
    assert "max_image_mib" in refusal(at(web, "/endless"), Names())


@pytest.mark.req("WIRE-04")
def test_nothing_is_unpacked_on_the_way(web: ImageHost) -> None:
    """What is counted is what is kept: a packed answer cannot grow."""
    assert fetch(at(web, "/packed"), Names()) == RED


@pytest.mark.req("WIRE-04")
@pytest.mark.parametrize("path", ["/drop_by_drop", "/silence"])
def test_a_host_that_takes_its_time_is_given_up(web: ImageHost, path: str) -> None:
    told = refusal(at(web, path), Names(), deadline_s=0.3)
    assert "0.3 s" in told or "Timeout" in told


@pytest.mark.req("WIRE-04")
def test_the_time_of_the_name_service_counts() -> None:
    class Slow(Names):
        async def resolve(self, host: str, port: int) -> list[str]:
            await asyncio.sleep(60)
            return []

    assert "within 0.2 s" in refusal("http://images.example/", Slow(), deadline_s=0.2)


@pytest.mark.req("WIRE-05")
def test_an_answer_cut_short_is_refused(web: ImageHost) -> None:
    assert "RemoteProtocolError" in refusal(at(web, "/cut"), Names())


@pytest.mark.req("SRV-02")
def test_slow_hosts_do_not_hold_up_the_others(web: ImageHost) -> None:
    """While one host keeps silent, others answer: nothing waits on the event loop."""

    async def race() -> bytes:
        fetcher = MediaFetcher((LISTED,), MAX_BYTES, Names().resolve)
        slow = asyncio.create_task(fetcher.fetch(ImageSource("images[0]", at(web, "/silence"))))
        while not web.seen:
            await asyncio.sleep(0.01)
        content = await fetcher.fetch(ImageSource("images[1]", at(web, "/red")))
        assert not slow.done()
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await fetcher.close()
        return content

    assert asyncio.run(race()) == RED


# --- TLS


@pytest.mark.req("SRV-06")
def test_https_is_spoken_under_the_hosts_name_and_its_certificate_is_checked(
    web: ImageHost, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_self_signed(tmp_path))
    named: list[str | None] = []

    def note_the_name(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        named.append(name)

    context.sni_callback = note_the_name
    with serving(ImageHost()) as host:
        host.socket = context.wrap_socket(host.socket, server_side=True)
        told = refusal(f"https://{LISTED}:{host.server_port}/red", Names())
    assert told == "the image cannot be fetched (ConnectError)"
    assert named == [LISTED]
    assert host.seen == []


def _self_signed(folder: Path) -> tuple[Path, Path]:
    """Certificate and key for the right name, of no authority anyone knows."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    options = f"req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN={LISTED}".split()
    name = ("-addext", f"subjectAltName=DNS:{LISTED}")
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run(["openssl", *options, *name, *files], check=True, capture_output=True)
    return certificate, key


# --- addresses


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "1.1.1.1",
        "192.0.1.1",
        "168.63.129.17",
        "2606:4700:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
    ],
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize(
    "address",
    [
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "2001::7f00:1",
        "64:ff9b:1::808:808",
        "100::1",
        "198.18.0.1",
        "192.0.2.1",
        "240.0.0.1",
        "0.1.2.3",
        "::a00:1",
        "192.0.0.8",
        "168.63.129.16",
        "192.88.99.1",
        "169.254.169.254",
        "100.100.100.200",
        "3fff::1",
        "5f00::1",
        "::ffff:168.63.129.16",
        "2002:a83f:8110::1",
        "64:ff9b::a83f:8110",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
