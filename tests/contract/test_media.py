"""Images are read from allowed paths, data URLs and base64, each within its bounds."""

import asyncio
import base64
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout_server.runtime.refusals import BadRequest
from rollout_server.serving import media
from rollout_server.serving.media import ImageSource, MediaLoader, decode_image, read_media_file
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import ProblemError
from shared_contracts.infer import InferCall
from tests.contract.test_rollouts import EchoEngine, answer, run

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
    loader = MediaLoader(settings(*allowed, **bounds))
    (loaded,) = asyncio.run(loaded_by(loader, [ImageSource("images[0]", image)]))
    return loaded


async def loaded_by(loader: MediaLoader, sources: list[ImageSource]) -> list[Image.Image]:
    async with loader.load(sources) as images:
        return images


def refusal(image: str, *allowed: Path, **bounds: Any) -> str:
    with pytest.raises(BadRequest) as error:
        load(image, *allowed, **bounds)
    assert error.value.where == "images[0]"
    return error.value.found


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_base64_with_and_without_a_data_url(form: str) -> None:
    text = as_base64(encoded(RED, form))
    lines = "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    for spelling in (text, lines, f"data:image/x;base64,{text}"):
        image = load(spelling)
        assert (image.mode, image.size) == ("RGB", (6, 4))


def test_images_are_turned_upright_and_lose_their_alpha() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    assert load(as_base64(encoded(RED, "JPEG", exif=exif))).size == (4, 6)
    assert load(as_base64(encoded(RED.convert("RGBA")))).mode == "RGB"


@pytest.mark.parametrize("form", ["GIF", "TIFF", "WEBP", "PNG"])
def test_of_many_frames_the_first_is_the_image(form: str) -> None:
    others = [Image.new("RGB", RED.size, (0, 0, level)) for level in range(100, 200)]
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


def test_an_allowed_directory_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    RED.save(tmp_path / "real" / "red.png")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("real", "link"):
        assert load(str(tmp_path / name / "red.png"), tmp_path / "link").size == (6, 4)


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
    "the file itself": lambda _, secret: str(secret),
    "a file URL": lambda _, secret: f"file://{secret}",
    "dots": lambda allowed, _: f"{allowed}/../secret.png",
    "dots behind a name that is missing": lambda allowed, _: f"{allowed}/x/../../secret.png",
    "many dots": lambda allowed, _: f"{allowed}/{'../' * 40}etc/passwd",
    "a directory whose name begins alike": lambda allowed, _: f"{allowed}-too/red.png",
    "what does not exist": lambda _, secret: f"{secret}.gone",
    "a device": lambda *_: "/dev/zero",
    "our own descriptors": lambda *_: "/proc/self/fd/0",
    "our own memory": lambda *_: "/proc/self/environ",
    "slashes": lambda _, secret: f"//{secret}",
}


@pytest.mark.req("WIRE-04", "SRV-06")
@pytest.mark.parametrize("spelling", ELSEWHERE)
def test_a_path_elsewhere_is_refused_and_nothing_told_about_it(
    fenced: tuple[Path, Path], spelling: str
) -> None:
    image = ELSEWHERE[spelling](*fenced)
    told = "the path is in no allowed folder of the server (--allowed-media-dir)"
    assert refusal(image, fenced[0]) == told
    assert refusal(image) == told


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
def test_a_folder_exchanged_for_a_link_before_it_is_opened_does_not_lead_out(
    fenced: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, secret = fenced
    folder = allowed / "folder"
    folder.mkdir()
    RED.save(folder / "secret.png")
    look_up = os.path.realpath

    def exchanged_after_it_was_looked_up(path: str) -> str:
        real = look_up(path)
        folder.rename(allowed / "aside")
        folder.symlink_to(secret.parent)
        return real

    monkeypatch.setattr(os.path, "realpath", exchanged_after_it_was_looked_up)
    source = ImageSource("images[0]", str(folder / "secret.png"))
    with pytest.raises(BadRequest, match="--allowed-media-dir"):
        read_media_file(source, [allowed], 1000)


@pytest.mark.req("WIRE-04")
def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name in ("pipe.png", "folder.png", ""):
        assert "not a regular file" in refusal(str(tmp_path / name), tmp_path)


@pytest.mark.req("WIRE-05")
def test_paths_that_cannot_be_one_are_refused(tmp_path: Path) -> None:
    for path in (f"{tmp_path}/\0.png", f"{tmp_path}/\ud800.png"):
        assert "not a valid path" in refusal(path, tmp_path)
    assert "no readable file" in refusal(f"{tmp_path}/{'a' * 5000}", tmp_path)
    assert "no readable file" in refusal(str(tmp_path / "gone.png"), tmp_path)
    assert "no readable file" in refusal(f"{tmp_path}/%2e%2e/gone.png", tmp_path)
    for path in ("relative.png", "", "~/a.png", "file:relative.png", "ftp://host/a.png"):
        assert "absolute path" in refusal(path, tmp_path)


# --- bounds


@pytest.mark.req("WIRE-04")
def test_the_bytes_of_an_image_are_bounded_before_it_is_decoded(tmp_path: Path) -> None:
    content = encoded(NOISE)
    mib = len(content) / 2**20
    (tmp_path / "noise.png").write_bytes(content)
    text = as_base64(content)
    for image in (str(tmp_path / "noise.png"), text, f"data:image/png;base64,{text}"):
        assert load(image, tmp_path, max_image_mib=mib).size == (64, 64)
        assert "max_image_mib" in refusal(image, tmp_path, max_image_mib=mib * 0.99)


@pytest.mark.req("WIRE-04")
def test_the_pixels_of_an_image_are_bounded_before_it_is_decoded() -> None:
    bomb = as_base64(encoded(Image.new("1", (2001, 1000))))
    assert "2001x1000 pixels" in refusal(bomb, max_image_megapixels=2.0)
    assert load(bomb, max_image_megapixels=2.1).size == (2001, 1000)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


@pytest.mark.req("WIRE-04")
@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt"])
def test_text_that_unpacks_to_a_multiple_is_refused(kind: bytes) -> None:
    packed = zlib.compress(b"a" * 2**26, 9)
    head = b"key\0\0" if kind == b"zTXt" else b"key\0\1\0\0\0"
    whole = encoded(RED)
    bomb = whole[:33] + png_chunk(kind, head + packed) + whole[33:]
    assert "cannot be read" in refusal(as_base64(bomb))


@pytest.mark.req("WIRE-04")
def test_more_images_than_served_are_refused() -> None:
    loader = MediaLoader(settings(max_images_per_request=2))
    source = ImageSource("images[0]", as_base64(encoded(RED)))
    assert len(asyncio.run(loaded_by(loader, [source] * 2))) == 2
    with pytest.raises(BadRequest, match="max_images_per_request") as error:
        asyncio.run(loaded_by(loader, [source] * 3))
    assert error.value.where == "images"


@pytest.mark.req("WIRE-04", "WIRE-05")
def test_every_refusal_names_its_request(tmp_path: Path) -> None:
    red = as_base64(encoded(RED))

    def request(*images: str) -> dict[str, Any]:
        marks = "<image>" * len(images)
        return {"messages": [{"role": "user", "content": marks}], "images": images}

    own = {"type": "image", "image": "http://127.0.0.1/a.png"}
    requests = [
        request(red),
        request(red, str(tmp_path / "a.png")),
        request(*[red] * 17),
        {"messages": [{"role": "user", "content": [own]}]},
        request("data:image/png;base64,aGVsbG8="),
    ]
    with pytest.raises(ProblemError) as error:
        run(answer(InferCall.model_validate({"infer_requests": requests}), EchoEngine()))
    problem = error.value.problem
    assert problem.status == 422
    assert [(fault["index"], fault["where"]) for fault in problem.errors or []] == [
        (1, "infer_requests[1].images[1]"),
        (2, "infer_requests[2].images"),
        (3, "infer_requests[3].messages[0].content[0].image"),
        (4, "infer_requests[4].images[0]"),
    ]


# --- broken images


@pytest.mark.req("WIRE-05")
def test_what_is_no_image_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "empty.png").touch()
    assert "known format" in refusal(str(tmp_path / "note.txt"), tmp_path)
    assert "known format" in refusal(str(tmp_path / "empty.png"), tmp_path)
    assert "not base64" in refusal("data:image/png,abc")
    assert "known format" in refusal("data:image/png;base64,aGVsbG8=")
    assert "known format" in refusal("data:image/png;base64,")
    assert "other characters" in refusal("data:image/png;base64,aGVsbG8%3D")
    assert "other characters" in refusal("data:image/png;base64,aGV\u00a0sbG8=")
    assert "broken" in refusal("data:image/png;base64,aGVsbG8")
    assert "known format" in refusal(as_base64(b"\x89PNG" + bytes(50)))


@pytest.mark.req("WIRE-04")
def test_a_path_that_cannot_be_read_is_told_like_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    told = {refusal(str(tmp_path / name), tmp_path) for name in ("absent", "a" * 255, "a" * 256)}
    assert told == {"there is no readable file at this path"}
    assert refusal(str(tmp_path / "loop"), tmp_path) in told


@pytest.mark.req("WIRE-05")
def test_no_address_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(content: bytes) -> None:
        raise OSError(f"broken: {io.BytesIO()}")

    monkeypatch.setattr(media, "cost_of", fail)
    assert refusal(as_base64(encoded(RED))) == (
        "the image cannot be read (broken: <_io.BytesIO object>)"
    )


@pytest.mark.req("WIRE-05")
def test_text_that_looks_like_base64_for_long_is_looked_through_once() -> None:
    """A pattern that goes back for every blank would take hours."""
    assert "absolute path" in refusal("iVBORw" + " " * 10**6 + "!")


@pytest.mark.req("WIRE-05")
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_an_image_cut_short_is_refused(form: str) -> None:
    whole = encoded(NOISE.convert("RGB"), form)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(BadRequest):
            decode_image(whole[: int(len(whole) * share)], ImageSource("images[0]", ""))


@pytest.mark.req("WIRE-05")
def test_a_fault_no_decoder_expects_is_the_callers_as_well() -> None:
    """To turn an image whose EXIF data holds text for a number, Pillow raises a TypeError."""
    exif = Image.Exif()
    exif.endian = "<"
    exif[0x0112] = 6
    exif[0x010E] = "x"
    whole = encoded(RED, "JPEG", exif=exif.tobytes())
    assert whole.count(b"\x0e\x01\x02\x00") == 1
    broken = whole.replace(b"\x0e\x01\x02\x00", b"\x1f\x01\x02\x00")
    assert "cannot be read" in refusal(as_base64(broken))
