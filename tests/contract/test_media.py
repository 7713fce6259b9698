"""Images are read from allowed paths, data URLs and base64, and from nowhere else."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from rollout_server.chat import ImageSource
from rollout_server.media import MAX_PIXELS, load_image
from rollout_server.problems import BadRequest


def encoded(image: Image.Image, form: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def load(image: str, *allowed: Path) -> Image.Image:
    return load_image(ImageSource("images[0]", image), list(allowed))


def refusal(image: str, *allowed: Path) -> str:
    with pytest.raises(BadRequest) as error:
        load(image, *allowed)
    assert error.value.where == "images[0]"
    return error.value.found


RED = Image.new("RGB", (6, 4), (255, 0, 0))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_base64_with_and_without_a_data_url(form: str) -> None:
    for text in (encoded(RED, form), f"data:image/x;base64,{encoded(RED, form)}"):
        image = load(text)
        assert (image.mode, image.size) == ("RGB", (6, 4))


def test_paths_below_an_allowed_directory(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    RED.save(tmp_path / "deep" / "red.png")
    assert load(str(tmp_path / "deep" / "red.png"), tmp_path).size == (6, 4)
    assert load(f"file://{tmp_path}/deep/red.png", tmp_path).size == (6, 4)


@pytest.mark.req("WIRE-04")
def test_paths_elsewhere_are_refused_also_through_links_and_dots(tmp_path: Path) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret.png"
    allowed.mkdir()
    RED.save(secret)
    (allowed / "link.png").symlink_to(secret)
    for path in (secret, allowed / "link.png", allowed / ".." / "secret.png", Path("/etc/passwd")):
        assert "--allowed-media-dir" in refusal(str(path), allowed)
    assert "--allowed-media-dir" in refusal(str(secret))


@pytest.mark.req("WIRE-04")
def test_urls_are_refused() -> None:
    assert "URL" in refusal("http://127.0.0.1/a.png")
    assert "URL" in refusal("https://example.com/a.png")


@pytest.mark.req("WIRE-05")
def test_what_is_no_image_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    assert "known format" in refusal(str(tmp_path / "note.txt"), tmp_path)
    assert "no file" in refusal(str(tmp_path / "gone.png"), tmp_path)
    assert "absolute path" in refusal("relative.png", tmp_path)
    assert "not base64" in refusal("data:image/png,abc")
    assert "known format" in refusal("data:image/png;base64,aGVsbG8=")
    whole = base64.b64decode(encoded(RED.resize((99, 99))))
    assert "cannot be read" in refusal(base64.b64encode(whole[:80]).decode())


@pytest.mark.req("WIRE-04")
def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    side = int(MAX_PIXELS**0.5) + 1
    bomb = encoded(Image.new("1", (side, side)))
    assert "pixels" in refusal(bomb)


def test_images_are_turned_upright_and_lose_their_alpha() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    file = io.BytesIO()
    RED.save(file, "JPEG", exif=exif)
    assert load(base64.b64encode(file.getvalue()).decode()).size == (4, 6)
    assert load(encoded(RED.convert("RGBA"))).mode == "RGB"
