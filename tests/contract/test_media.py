"""Images from allowed paths, data URLs, base64 and listed hosts, each within its bounds."""

import asyncio
import base64
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout_server.runtime.refusals import BadRequest
from rollout_server.serving.media import (
    ImageSource,
    MediaLoader,
    decode_image,
    read_media_file,
)
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.preflight import check_media
from shared_contracts.errors import ContractError

RED = Image.new("RGB", (6, 4), (255, 0, 0))
NOISE = Image.effect_noise((64, 64), 50)


def settings(*allowed: Path, **bounds: Any) -> ServerSettings:
    return ServerSettings(model=Path("/m"), device="cpu", allowed_media_dirs=allowed, **bounds)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def as_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def load(image: str, *allowed: Path, **bounds: Any) -> Image.Image:
    async def once() -> Image.Image:
        loader = MediaLoader(settings(*allowed, **bounds))
        try:
            (loaded,) = await loaded_by(loader, [ImageSource("images[0]", image)])
        finally:
            await loader.close()
        return loaded

    return asyncio.run(once())


async def loaded_by(loader: MediaLoader, sources: list[ImageSource]) -> list[Image.Image]:
    async with loader.load(sources) as images:
        return images


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


@pytest.mark.parametrize("form", ["WEBP", "PNG"])
def test_first_of_many_frames_is_the_image(form: str) -> None:
    others = [Image.new("RGB", RED.size, (0, 0, level)) for level in range(100, 110)]
    many = encoded(RED, form, save_all=True, append_images=others)
    red, _, blue = load(as_base64(many)).getpixel((2, 2))  # type: ignore[misc]
    assert red > 240
    assert blue < 15


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
    """An allowed directory, and an image beside it."""
    allowed, secret = tmp_path / "allowed", tmp_path / "secret.png"
    allowed.mkdir()
    (tmp_path / "allowed-too").mkdir()
    RED.save(secret)
    RED.save(tmp_path / "allowed-too" / "red.png")
    return allowed, secret


ELSEWHERE: dict[str, Callable[[Path, Path], str]] = {
    "file": lambda _, secret: str(secret),
    "file URL": lambda _, secret: f"file://{secret}",
    "dots": lambda allowed, _: f"{allowed}/../secret.png",
    "dots after a missing name": lambda allowed, _: f"{allowed}/x/../../secret.png",
    "folder with the same prefix": lambda allowed, _: f"{allowed}-too/red.png",
    "missing file": lambda _, secret: f"{secret}.gone",
    "device": lambda *_: "/dev/zero",
    "own descriptors": lambda *_: "/proc/self/fd/0",
    "slashes": lambda _, secret: f"//{secret}",
}


@pytest.mark.req("WIRE-04", "SRV-06")
@pytest.mark.parametrize("spelling", ELSEWHERE)
def test_path_outside_is_refused_without_details(fenced: tuple[Path, Path], spelling: str) -> None:
    image = ELSEWHERE[spelling](*fenced)
    found = "the path is in no allowed folder of the server (--allowed-media-dir)"
    assert refusal(image, fenced[0]) == found
    assert refusal(image) == found


@pytest.mark.req("WIRE-04", "SRV-06")
def test_links_that_lead_out_are_refused(fenced: tuple[Path, Path]) -> None:
    allowed, secret = fenced
    (allowed / "file.png").symlink_to(secret)
    (allowed / "folder").symlink_to(secret.parent)
    (allowed / "chain.png").symlink_to(allowed / "file.png")
    (allowed / "relative.png").symlink_to("../secret.png")
    for name in ("file.png", "folder/secret.png", "chain.png", "relative.png"):
        assert "--allowed-media-dir" in refusal(str(allowed / name), allowed)


@pytest.mark.req("WIRE-04", "SRV-06")
def test_folder_exchanged_for_a_link_before_the_open_is_refused(
    fenced: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, secret = fenced
    folder = allowed / "folder"
    folder.mkdir()
    RED.save(folder / "secret.png")
    resolve = os.path.realpath

    def exchange_after_check(path: str) -> str:
        real = resolve(path)
        folder.rename(allowed / "aside")
        folder.symlink_to(secret.parent)
        return real

    monkeypatch.setattr(os.path, "realpath", exchange_after_check)
    source = ImageSource("images[0]", str(folder / "secret.png"))
    with pytest.raises(BadRequest, match="--allowed-media-dir"):
        read_media_file(source, [allowed], 1000)


@pytest.mark.req("WIRE-04")
def test_path_that_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name in ("pipe.png", "folder.png", ""):
        assert "not a regular file" in refusal(str(tmp_path / name), tmp_path)


@pytest.mark.req("WIRE-05")
def test_impossible_paths_are_refused(tmp_path: Path) -> None:
    for path in (f"{tmp_path}/\0.png", f"{tmp_path}/\ud800.png"):
        assert "not a valid path" in refusal(path, tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for name in ("a" * 5000, "gone.png", "%2e%2e/gone.png", "a" * 256, "loop"):
        expected = "there is no readable file at this path"
        assert refusal(f"{tmp_path}/{name}", tmp_path) == expected
    for path in ("relative.png", "", "~/a.png", "file:relative.png", "ftp://host/a.png"):
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
        assert "max_image_mib" in refusal(image, tmp_path, max_image_mib=mib * 0.99)


@pytest.mark.req("WIRE-04")
def test_image_pixels_are_bounded_before_decoding() -> None:
    bomb = as_base64(encoded(Image.new("1", (2001, 1000))))
    assert "2001x1000 pixels" in refusal(bomb, max_image_megapixels=2.0)
    assert load(bomb, max_image_megapixels=2.1).size == (2001, 1000)


@pytest.mark.req("WIRE-04", "SRV-06")
def test_decoded_images_of_a_request_have_a_bound_and_requests_wait_for_room() -> None:
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

    async def work() -> None:
        loader = MediaLoader(settings(**bounds))
        await asyncio.gather(*(hold(loader, source) for source in sources))
        with pytest.raises(BadRequest) as error:
            await loaded_by(loader, sources)
        expected = "decoded they take 38 MiB, and the server has 10 (max_decoded_mib)"
        assert error.value.found == expected

    asyncio.run(work())
    with pytest.raises(ContractError) as error:
        check_media(settings(max_decoded_mib=1220))
    assert error.value.where == "max_decoded_mib"
    assert error.value.do == "Give at least 1221, or allow smaller images"


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
    for name in ("note.txt", "empty.png"):
        assert "known format" in refusal(str(tmp_path / name), tmp_path)
    for text, found in (
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "known format"),
        ("data:image/png;base64,", "known format"),
        ("data:image/png;base64,aGVsbG8%3D", "other characters"),
        ("data:image/png;base64,aGVsbG8", "broken"),
        (as_base64(b"\x89PNG" + bytes(50)), "known format"),
        # A pattern that backtracks over the blanks would take hours.
        ("iVBORw" + " " * 10**6 + "!", "absolute path"),
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


LISTED: dict[str, Any] = {"allow_media_urls": True, "allowed_media_hosts": ("127.0.0.1",)}


class Host(BaseHTTPRequestHandler):
    """`/red.png` is an image, `/text` is none, and `/endless` does not end."""

    def do_GET(self) -> None:
        self.send_response(404 if self.path == "/missing" else 200)
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


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    with Web(("127.0.0.1", 0), Host) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.req("WIRE-04")
def test_image_of_a_listed_host_is_loaded(web: str) -> None:
    assert load(f"{web}/red.png", **LISTED).getpixel((1, 1)) == (255, 0, 0)


@pytest.mark.req("SRV-06", "WIRE-04", "WIRE-05")
@pytest.mark.parametrize(
    ("path", "settings", "found"),
    [
        ("/red.png", {}, "--allow-media-urls"),
        ("/red.png", {"allow_media_urls": True}, "--allowed-media-host"),
        ("/text", LISTED, "known format"),
        ("/missing", LISTED, "answered 404"),
        ("/endless", LISTED, "max_image_mib"),
        (".evil/red.png", LISTED, "malformed|no valid port"),
    ],
)
def test_other_urls_are_refused(web: str, path: str, settings: dict[str, Any], found: str) -> None:
    refused = refusal(web + path, **settings)
    assert re.search(found, refused)
    assert "secret" not in refused
