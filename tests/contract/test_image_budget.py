"""What images may take of the server's memory, over all calls (WIRE-04, SRV-06)."""

import asyncio
import base64
import io
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollout_server.runtime.concurrency import Budget
from rollout_server.runtime.refusals import BadRequest
from rollout_server.serving import media
from rollout_server.serving.media import (
    ImageCost,
    ImageSource,
    MediaLoader,
    cost_of,
    webp_canvas,
)
from rollout_server.settings.options import BYTES_PER_PIXEL, ServerSettings
from rollout_server.settings.preflight import check_media
from shared_contracts.errors import ContractError

pytestmark = pytest.mark.req("SRV-06", "WIRE-04")


def settings(**bounds: Any) -> ServerSettings:
    return ServerSettings(model=Path("/m"), device="cpu", **bounds)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def source(content: bytes, place: int = 0) -> ImageSource:
    text = base64.b64encode(content).decode()
    return ImageSource(f"images[{place}]", f"data:image/x;base64,{text}")


SMALL = Image.new("RGB", (3, 2), (255, 0, 0))


def webp_on_a_large_canvas() -> bytes:
    """One frame of 3 x 2 pixels on a canvas of 16383 x 16383 (RFC 9649)."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)

    def u24(value: int) -> bytes:
        return value.to_bytes(3, "little")

    still = encoded(SMALL, "WEBP", lossless=True)[12:]
    frame = u24(0) * 2 + u24(2) + u24(1) + u24(100) + b"\0" + still
    parts = chunk(b"VP8X", b"\2\0\0\0" + u24(16382) * 2)
    parts += chunk(b"ANIM", bytes(6)) + chunk(b"ANMF", frame)
    return b"RIFF" + struct.pack("<I", len(parts) + 4) + b"WEBP" + parts


def tiff_of_a_large_tile() -> bytes:
    """An image of 3 x 2 pixels in a packed tile of 16000 x 16000 (TIFF 6.0, section 15)."""
    tags = [
        (256, 3),
        (257, 2),
        (258, 8),
        (259, 5),
        (262, 1),
        (277, 1),
        (322, 16000),
        (323, 16000),
        (324, 8),
        (325, 4),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 12) + b"\x80\x0b\x60\x50" + directory


HOSTILE = {"WebP": webp_on_a_large_canvas, "TIFF": tiff_of_a_large_tile}

PEAK = """
import asyncio, resource, sys
from pathlib import Path
from PIL import Image
from rollout_server.serving.media import ImageSource
from rollout_server.serving.media import MediaLoader
from rollout_server.runtime.refusals import BadRequest
from rollout_server.settings.options import BYTES_PER_PIXEL, ServerSettings

async def load(image):
    loader = MediaLoader(ServerSettings(model=Path("/m"), device="cpu"))
    async with loader.load([ImageSource("images[0]", image)]):
        pass

Image.init()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    asyncio.run(load(sys.argv[1]))
except BadRequest as error:
    print(error.found)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_of_some_bytes_takes_no_large_memory(kind: str) -> None:
    """Pillow takes 2 GB to open the first, and 256 MB to decode the second."""
    content = HOSTILE[kind]()
    assert len(content) < 200
    command = [sys.executable, "-c", PEAK, source(content).image]
    told, mib = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split(
        "\n"
    )[:2]
    assert "more than 64 million" in told
    assert int(mib) < 64


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
@pytest.mark.parametrize("size", [(1, 1), (300, 20), (20, 300)])
def test_the_header_tells_what_decoding_takes(form: str, size: tuple[int, int]) -> None:
    cost = cost_of(encoded(Image.new("RGB", size), form))
    assert (cost.width, cost.height) == size
    assert cost.decoding + cost.rendering >= size[0] * size[1] * BYTES_PER_PIXEL


@pytest.mark.parametrize("size", [(1, 1), (16383, 1), (2, 16383), (300, 200)])
@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0"}])
def test_the_canvas_of_a_webp_is_what_pillow_finds(
    size: tuple[int, int], options: dict[str, Any]
) -> None:
    content = encoded(Image.new("RGB", size), "WEBP", **options)
    with Image.open(io.BytesIO(content)) as image:
        assert webp_canvas(content) == image.size == size


def test_an_image_that_is_named_many_times_is_looked_at_and_decoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[str] = []
    looked_at: list[bytes] = []
    real = media.decode_image

    def looked(content: bytes) -> ImageCost:
        looked_at.append(content)
        return cost_of(content)

    def counted(content: bytes, where: ImageSource) -> Image.Image:
        decoded.append(where.where)
        return real(content, where)

    async def load() -> list[tuple[int, ...]]:
        red, blue = encoded(SMALL, "PNG"), encoded(Image.new("RGB", (1, 1), (0, 0, 255)), "PNG")
        named = [red, blue, *[red] * 10, blue]
        loader = MediaLoader(settings())
        async with loader.load([source(each, i) for i, each in enumerate(named)]) as images:
            return [image.size for image in images]

    monkeypatch.setattr(media, "cost_of", looked)
    monkeypatch.setattr(media, "decode_image", counted)
    assert asyncio.run(load()) == [(3, 2), (1, 1), *[(3, 2)] * 10, (1, 1)]
    assert decoded == ["images[0]", "images[1]"]
    assert len(looked_at) == 2


def test_images_wait_until_there_is_memory_for_them() -> None:
    """Three of four requests fit at once; they are let in in order."""
    content = encoded(Image.fromarray(np.zeros((100, 100, 3), np.uint8)), "PNG")
    inside: list[int] = []
    most: list[int] = []

    async def hold(loader: MediaLoader, number: int) -> None:
        async with loader.load([source(content)]):
            inside.append(number)
            most.append(len(inside))
            await asyncio.sleep(0.01)
            inside.remove(number)

    async def run() -> None:
        needed = 3.5 * 100 * 100 * BYTES_PER_PIXEL / 2**20
        loader = MediaLoader(settings(max_decoded_mib=needed, max_image_megapixels=0.01))
        await asyncio.gather(*(hold(loader, number) for number in range(8)))

    asyncio.run(run())
    assert max(most) == 3


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    contents = [encoded(Image.new("RGB", (500, 500), (i, 0, 0)), "PNG") for i in range(8)]

    async def load() -> None:
        loader = MediaLoader(settings(max_decoded_mib=10, max_image_megapixels=0.25))
        async with loader.load([source(content) for content in contents]):
            raise AssertionError("they fit")

    with pytest.raises(BadRequest) as error:
        asyncio.run(load())
    assert error.value.found == (
        "decoded they take 38 MiB, and the server has 10 (max_decoded_mib)"
    )


def test_a_budget_smaller_than_one_image_is_refused_at_the_start() -> None:
    check_media(settings(max_decoded_mib=1221))
    with pytest.raises(ContractError) as error:
        check_media(settings(max_decoded_mib=1220))
    assert error.value.where == "max_decoded_mib"
    assert error.value.do == "Give at least 1221, or allow smaller images"


def test_nobody_overtakes_who_waits_for_much() -> None:
    order: list[str] = []

    async def use(budget: Budget, name: str, size: int) -> None:
        async with budget.take(size):
            order.append(name)
            await asyncio.sleep(0)

    async def run() -> None:
        budget = Budget(10)
        async with budget.take(5):
            given_up = asyncio.create_task(use(budget, "given up", 6))
            calls = [
                asyncio.create_task(use(budget, name, size))
                for name, size in [("large", 10), ("small", 1)]
            ]
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.sleep(0)
            assert order == []
        await asyncio.gather(*calls)
        async with asyncio.timeout(1), budget.take(10):
            assert order == ["large", "small"]

    asyncio.run(run())
