"""Learner and server read the same pixels from the same file, in every mode."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from vllm.multimodal.image import convert_image_mode

from learner.data.images import ImageInfo, UnreadableImage, inspect_image, open_upright
from rollout_server.engines.engine_protocol import BadRequest
from rollout_server.serving.media import ImageSource, decode_image

pytestmark = pytest.mark.req("WIRE-04", "ROLL-01")

Pixels = npt.NDArray[np.uint8]

# Every value of a byte, 16 x 16, and with another byte below it.
BYTES = np.arange(256, dtype=np.uint8).reshape(16, 16)
WORDS = BYTES.astype(np.uint16) * 256 + BYTES[::-1]
COLOURS = np.stack([BYTES, BYTES[::-1], BYTES.T], axis=-1)
GREY = np.stack([BYTES] * 3, axis=-1)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


Chunk = tuple[bytes, bytes]


def png(
    bits: int, kind: int, values: npt.NDArray[Any], *chunks: Chunk, behind: tuple[Chunk, ...] = ()
) -> bytes:
    """A PNG, also of the kinds that Pillow reads and does not write.

    kind: its colour type. chunks, behind: what stands before and behind its pixels.
    """
    height, width = values.shape[:2]
    rows = values.astype(">u2" if bits == 16 else np.uint8).reshape(height, -1)
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    header = struct.pack(">2I5B", width, height, bits, kind, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", data), *behind, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )


def servers(content: bytes) -> Image.Image:
    return decode_image(content, ImageSource("images[0]", ""))


def seen(content: bytes) -> Pixels:
    """The pixels of a file, height x width x 3; both sides must agree."""
    ours, theirs = open_upright(io.BytesIO(content)), servers(content)
    assert (ours.mode, theirs.mode) == ("RGB", "RGB")
    assert ours.tobytes() == theirs.tobytes()
    assert ours.size == theirs.size
    return np.asarray(ours)


def test_16_bit_values_become_their_high_bytes() -> None:
    assert (seen(png(16, 0, WORDS)) == GREY).all()
    opaque = np.full_like(WORDS, 0xFFFF)
    assert (seen(png(16, 6, np.stack([*[WORDS] * 3, opaque], axis=-1))) == GREY).all()


RGB = Image.fromarray(COLOURS)
ALPHA = Image.fromarray(BYTES.T.copy())


def translucent(mode: str) -> Image.Image:
    image = RGB.convert(mode)
    image.putalpha(ALPHA)
    return image


def palette_with_alpha() -> Image.Image:
    image = RGB.quantize(16)
    image.info["transparency"] = bytes(range(0, 256, 16))
    return image


TRANSPARENT: dict[str, bytes] = {
    "RGBA": file_of(translucent("RGB")),
    "LA, WEBP": file_of(translucent("L"), "WEBP", lossless=True),
    "P, an alpha for each colour": file_of(palette_with_alpha()),
    "L": file_of(Image.fromarray(BYTES), transparency=77),
    "RGB": file_of(RGB, transparency=tuple(int(v) for v in COLOURS[3, 4])),
}


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_transparent_pixels_lie_on_white_as_in_vllm(kind: str) -> None:
    content = TRANSPARENT[kind]
    with Image.open(io.BytesIO(content)) as opened:
        with_alpha = opened.convert("RGBA")
        expected = np.asarray(convert_image_mode(with_alpha, "RGB"))
        alpha = np.asarray(with_alpha)[..., 3]
    pixels = seen(content)
    assert (pixels == expected).all()
    assert (alpha == 0).any()
    assert (pixels[alpha == 0] == 255).all()


def test_colours_are_kept() -> None:
    assert (seen(file_of(RGB)) == COLOURS).all()
    assert (seen(file_of(Image.fromarray(BYTES), "BMP")) == GREY).all()
    cmyk = Image.new("RGB", (16, 16), (200, 100, 50)).convert("CMYK")
    apart = seen(file_of(cmyk, "JPEG")).astype(int) - (200, 100, 50)
    assert np.abs(apart).max() <= 3


@pytest.mark.parametrize(
    ("kind", "colour", "shown"), [(0, (7,), "7"), (2, (1, 2, 256), "(1, 2, 256)")]
)
def test_16_bits_with_a_transparent_colour_are_refused(
    kind: int, colour: tuple[int, ...], shown: str, tmp_path: Path
) -> None:
    """kind: the colour type of the PNG."""
    pixels = np.stack([WORDS] * len(colour), axis=-1)
    content = png(16, kind, pixels, (b"tRNS", struct.pack(f">{len(colour)}H", *colour)))
    path = tmp_path / "image"
    path.write_bytes(content)
    why = f"has 16 bits a value and the transparent colour {shown}"
    with pytest.raises(UnreadableImage) as ours:
        open_upright(path)
    refusals = (ours.value, inspect_image(path), inspect_image(path, decode=True))
    assert [str(each) for each in refusals] == [why] * 3
    with pytest.raises(BadRequest) as theirs:
        servers(content)
    assert (theirs.value.where, theirs.value.found) == ("images[0]", f"the image {why}")


# Where the stored top left quarter is upright: lower half, right half (EXIF 2.32, 4.6.4).
ORIGIN = dict(enumerate([(0, 0), (0, 1), (1, 1), (1, 0), (0, 0), (0, 1), (1, 1), (1, 0)], start=1))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_both_sides_apply_the_exif_orientation(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.new("RGB", (32, 16), (0, 0, 0))
    stored.paste((255, 255, 255), (0, 0, 16, 8))  # the top left quarter
    pixels = seen(file_of(stored, form, exif=exif))
    assert pixels.shape == ((32, 16, 3) if orientation >= 5 else (16, 32, 3))
    height, width = pixels.shape[:2]
    down, right = ORIGIN[orientation]
    quarter = pixels[down * height // 2 :, right * width // 2 :][: height // 2, : width // 2]
    assert quarter.min() > 240
    assert abs(pixels.astype(int).sum() - 255 * 3 * 128) < 255 * 3 * 4


XMP = b"XML:com.adobe.xmp\0\0\0\0\0" + b'<x tiff:Orientation="6"/>'
ON_ITS_SIDE = Image.Exif()
ON_ITS_SIDE[0x0112] = 6


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize(
    "chunk", [(b"eXIf", ON_ITS_SIDE.tobytes().removeprefix(b"Exif\0\0")), (b"iTXt", XMP)]
)
def test_png_header_shows_the_upright_size(place: str, chunk: Chunk, tmp_path: Path) -> None:
    stored = COLOURS[:8]
    content = png(8, 2, stored, chunk) if place == "before" else png(8, 2, stored, behind=(chunk,))
    assert seen(content).shape == (16, 8, 3)
    path = tmp_path / "image.png"
    path.write_bytes(content)
    for decode in (False, True):
        found = inspect_image(path, decode=decode)
        assert isinstance(found, ImageInfo)
        assert found[:2] == ((8, 16), True)
    assert open_upright(path).size == (8, 16)
