"""Images from allowed paths, data URLs, base64 and listed hosts, each within its bounds."""

import asyncio
import base64
import io
import os
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout_server.engines.engine_protocol import BadRequest
from rollout_server.serving.media import (
    ImageSource,
    MediaLoader,
    decode_image,
    fetch,
    listed_url,
    read_media_file,
)
from tests.contract.served_app import settings
from tests.contract.update_bench import asynchronous

RED = Image.new("RGB", (6, 4), (255, 0, 0))
NOISE = Image.effect_noise((64, 64), 50)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def as_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def loaded_by(loader: MediaLoader, sources: list[ImageSource]) -> list[Image.Image]:
    async with loader.load(sources) as images:
        return images


def load(image: str, *allowed: Path, **bounds: Any) -> Image.Image:
    loader = MediaLoader(settings(allowed_media_dirs=allowed, **bounds))
    (loaded,) = asyncio.run(loaded_by(loader, [ImageSource("images[0]", image)]))
    return loaded


def refusal(image: str, *allowed: Path, **bounds: Any) -> str:
    with pytest.raises(BadRequest) as error:
        load(image, *allowed, **bounds)
    assert error.value.where == "images[0]"
    return error.value.found


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP"])
def test_base64_with_and_without_a_data_url(form: str) -> None:
    text = as_base64(encoded(RED, form))
    lines = "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    for spelling in (text, lines, f"data:image/x;base64,{text}"):
        image = load(spelling)
        assert (image.mode, image.size) == ("RGB", (6, 4))


# --- paths


def test_paths_below_an_allowed_directory(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    RED.save(tmp_path / "deep" / "100%25.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "deep" / "100%25.png")
    for path in ("deep/100%25.png", "deep/../deep/100%25.png", "link.png"):
        assert load(f"{tmp_path}/{path}", tmp_path).size == (6, 4)
        assert load(f"file://{tmp_path}/{path}", tmp_path).size == (6, 4)
    (tmp_path / "folder").symlink_to(tmp_path / "deep")
    linked = tmp_path / "folder" / "100%25.png"
    assert load(str(linked), tmp_path / "folder").size == (6, 4)


@pytest.fixture
def fenced(tmp_path: Path) -> tuple[Path, Path]:
    """An allowed directory with links that lead out of it, and an image beside it."""
    allowed, secret = tmp_path / "allowed", tmp_path / "secret.png"
    allowed.mkdir()
    (tmp_path / "allowed-too").mkdir()
    RED.save(secret)
    RED.save(tmp_path / "allowed-too" / "red.png")
    (allowed / "file.png").symlink_to(secret)
    (allowed / "folder").symlink_to(secret.parent)
    return allowed, secret


OUTSIDE: dict[str, Callable[[Path, Path], str]] = {
    "file": lambda _, secret: str(secret),
    "dots": lambda allowed, _: f"{allowed}/../secret.png",
    "folder with the same prefix": lambda allowed, _: f"{allowed}-too/red.png",
    "missing file": lambda _, secret: f"{secret}.gone",
    "device": lambda *_: "/dev/zero",
    "link": lambda allowed, _: f"{allowed}/file.png",
    "link to a folder": lambda allowed, _: f"{allowed}/folder/secret.png",
}


@pytest.mark.req("WIRE-04", "SRV-06")
@pytest.mark.parametrize("spelling", OUTSIDE)
def test_path_outside_is_refused_without_details(fenced: tuple[Path, Path], spelling: str) -> None:
    image = OUTSIDE[spelling](*fenced)
    found = "the path is in no allowed folder of the server (--allowed-media-dir)"
    assert refusal(image, fenced[0]) == found
    assert refusal(image) == found


@pytest.mark.req("WIRE-04", "SRV-06")
@pytest.mark.parametrize(
    ("exchanged", "found"), [("folder", "--allowed-media-dir"), ("file", "no readable file")]
)
def test_path_exchanged_for_a_link_before_the_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: str, found: str
) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret.png"
    image = allowed / "inside" / "secret.png"
    image.parent.mkdir(parents=True)
    RED.save(secret)
    RED.save(image)
    path = image if exchanged == "file" else image.parent
    resolve = os.path.realpath

    def exchange_after_resolving(name: str) -> str:
        real = resolve(name)
        path.rename(allowed / "aside")
        path.symlink_to(secret if exchanged == "file" else tmp_path)
        return real

    monkeypatch.setattr(os.path, "realpath", exchange_after_resolving)
    with pytest.raises(BadRequest, match=found):
        read_media_file(ImageSource("images[0]", str(image)), [allowed], 1000)


@pytest.mark.req("WIRE-04", "WIRE-05")
def test_paths_without_a_readable_file_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    assert "not a regular file" in refusal(f"{tmp_path}/pipe.png", tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for name in ("", "\0.png", "\ud800.png", "a" * 5000, "gone.png", "loop"):
        assert refusal(f"{tmp_path}/{name}", tmp_path) == "there is no readable file at this path"
    for path in ("relative.png", "", "ftp://host/a.png"):
        assert "absolute path" in refusal(path, tmp_path)


# --- bounds


@pytest.mark.req("WIRE-04")
def test_image_bytes_are_bounded_before_decoding(tmp_path: Path) -> None:
    content = encoded(NOISE)
    mib = len(content) / 2**20
    (tmp_path / "noise.png").write_bytes(content)
    text = as_base64(content)
    for image in (str(tmp_path / "noise.png"), text, f"data:image/png;base64,{text}"):
        assert load(image, tmp_path, max_image_mib=mib).size == (64, 64)
        for less in (0.99, 1 - 1 / len(content)):
            assert "max_image_mib" in refusal(image, tmp_path, max_image_mib=mib * less)
    os.truncate(tmp_path / "noise.png", 2**36)  # sparse
    assert "max_image_mib" in refusal(f"{tmp_path}/noise.png", tmp_path)


@pytest.mark.req("WIRE-04")
def test_image_pixels_are_bounded_before_decoding() -> None:
    bomb = as_base64(encoded(Image.new("1", (2001, 1000))))
    assert "2001x1000 pixels" in refusal(bomb, max_image_megapixels=2.0)
    assert load(bomb, max_image_megapixels=2.1).size == (2001, 1000)


@pytest.mark.req("WIRE-04")
@pytest.mark.parametrize(("side", "found"), [(9000, "9000x9000 pixels"), (2**24, "pixels")])
def test_small_frame_on_a_huge_webp_canvas_is_refused(side: int, found: str) -> None:
    content = bytearray(encoded(RED, "WEBP", save_all=True, append_images=[NOISE.resize((6, 4))]))
    assert content[12:16] == b"VP8X"
    content[24:30] = struct.pack("<I", side - 1)[:3] * 2  # width and height (RFC 9649, 2.7)
    assert found in refusal(as_base64(bytes(content)))


@pytest.mark.req("WIRE-04", "SRV-06")
@asynchronous
async def test_decoded_images_of_a_request_have_a_bound_and_requests_wait_for_room() -> None:
    images = [as_base64(encoded(Image.new("RGB", (500, 500), (i, 0, 0)))) for i in range(8)]
    sources = [ImageSource(f"images[{i}]", image) for i, image in enumerate(images)]
    bounds = {"max_decoded_mib": 10, "max_image_megapixels": 0.25}
    inside: list[int] = []

    async def hold(loader: MediaLoader, source: ImageSource) -> None:
        async with loader.load([source]):
            inside.append(+1)
            assert sum(inside) <= 2
            await asyncio.sleep(0)
            inside.append(-1)

    loader = MediaLoader(settings(**bounds))
    await asyncio.gather(*(hold(loader, source) for source in sources))
    with pytest.raises(BadRequest) as error:
        await loaded_by(loader, sources)
    expected = "decoded they take 38 MiB, and the server has 10 (max_decoded_mib)"
    assert (error.value.where, error.value.found) == ("images", expected)


@pytest.mark.req("WIRE-04")
def test_images_above_the_number_per_request_are_refused() -> None:
    loader = MediaLoader(settings(max_images_per_request=2))
    source = ImageSource("images[0]", as_base64(encoded(RED)))
    assert len(asyncio.run(loaded_by(loader, [source] * 2))) == 2
    with pytest.raises(BadRequest, match="max_images_per_request") as error:
        asyncio.run(loaded_by(loader, [source] * 3))
    assert error.value.where == "images"


# --- broken images


@pytest.mark.req("WIRE-05")
def test_content_that_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "empty.png").touch()
    RED.save(tmp_path / "red.gif")
    for name in ("note.txt", "empty.png", "red.gif"):
        assert "known format" in refusal(f"{tmp_path}/{name}", tmp_path)
    for text, found in (
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "known format"),
        ("data:image/png;base64,aGVsbG8é", "broken"),
        ("data:image/png;base64,aGVs*bG8=", "broken"),
        (as_base64(b"\x89PNG" + bytes(50)), "known format"),
    ):
        assert found in refusal(text)


@pytest.mark.req("WIRE-05")
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP"])
def test_image_cut_short_is_refused(form: str) -> None:
    whole = encoded(NOISE.convert("RGB"), form)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(BadRequest):
            decode_image(whole[: int(len(whole) * share)], ImageSource("images[0]", ""))


# --- URLs


class Host(BaseHTTPRequestHandler):
    """`/red.png` is an image. `/text` is none, `/endless` does not end, `/silent` does not start.

    requests: the paths that were requested, of all hosts.
    """

    requests: list[str]
    stopping: threading.Event

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.path == "/silent":
            self.stopping.wait()
            return
        self.send_response({"/missing": 404, "/redirect": 302}.get(self.path, 200))
        if self.path == "/redirect":
            self.send_header("Location", "/red.png")
        self.end_headers()
        if self.path == "/red.png":
            self.wfile.write(encoded(RED))
        while self.path == "/endless":
            self.wfile.write(bytes(10_000))
        self.wfile.write(b"a secret of this host")

    def log_message(self, format: str, *args: Any) -> None: ...


class Web(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """The client closes the connection of an endless answer."""


@pytest.fixture
def web() -> Iterator[str]:
    """The `127.0.0.1:port` of a host."""
    Host.requests, Host.stopping = [], threading.Event()
    with Web(("127.0.0.1", 0), Host) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        Host.stopping.set()
        server.shutdown()
        thread.join()


def listing(*hosts: str) -> dict[str, Any]:
    return {"allowed_media_hosts": hosts}


@pytest.mark.req("WIRE-04")
def test_image_of_a_listed_host_is_loaded(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")  # without effect
    assert load(f"http://{web}/red.png", **listing(web)).getpixel((1, 1)) == (255, 0, 0)
    assert load(f"HTTP://{web}/red.png", **listing("images.example", web)).size == (6, 4)


@pytest.mark.req("SRV-06", "WIRE-04", "WIRE-05")
@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/text", "known format"),
        ("/missing", "answered 404"),
        ("/redirect", "answered 302, not 200 (redirects are not followed)"),
        ("/endless", "max_image_mib"),
    ],
)
def test_other_answers_of_a_listed_host_are_refused(web: str, path: str, found: str) -> None:
    refused = refusal(f"http://{web}{path}", max_image_mib=0.1, **listing(web))
    assert found in refused
    assert "secret" not in refused
    assert Host.requests == [path]


@pytest.mark.req("SRV-06", "WIRE-04")
def test_host_that_sends_nothing_is_refused_at_the_deadline(web: str) -> None:
    source = ImageSource("images[0]", f"http://{web}/silent")
    with pytest.raises(BadRequest, match=r"did not send the image within 0\.5 s"):
        asyncio.run(fetch(source, [web], 1000, deadline_s=0.5))


@pytest.mark.req("SRV-06", "WIRE-04", "WIRE-05")
@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1/red.png", "fetches no image from"),
        ("http://localhost:{port}/red.png", "fetches no image from"),
        ("http://images.example#@{web}/red.png", "fetches no image from"),
        ("http://images.example@{web}/red.png", "fetches no image from"),
        ("http:///red.png", "fetches no image from"),
        ("http://{web}.evil/", "malformed"),
        ("http://[::1/", "malformed"),
        ("http://\ud800/", "malformed"),
    ],
)
def test_url_of_another_host_is_refused_and_not_requested(web: str, url: str, found: str) -> None:
    image = url.format(web=web, port=web.split(":")[1])
    assert found in refusal(image, **listing(web))
    for options in ({}, listing("127.0.0.1")):
        assert "--allowed-media-host" in refusal(f"http://{web}/red.png", **options)
    assert Host.requests == []


def test_listed_host_without_a_port_has_the_default_port() -> None:
    for url in ("http://images.example/a.png", "https://IMAGES.example:443/a.png"):
        found = listed_url(ImageSource("images[0]", url), ["Images.Example"])
        assert found.host == "images.example"
    with pytest.raises(BadRequest):
        listed_url(ImageSource("images[0]", "http://images.example:443/a"), ["images.example"])
