"""Images as a page embeds them."""

import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from learner.data.images import UnreadableImage, large_images_allowed, open_upright

# The longer side of an embedded image, in pixels.
LONGEST = 640
_JPEG_QUALITY = 82
# Each holds a decoded image, which may be of hundreds of megabytes.
_AT_ONCE = 4


@dataclass(frozen=True)
class Picture:
    """src: a data URI; empty where the image cannot be read, and problem says why.

    width, height: pixels of the embedded image.
    """

    src: str = ""
    width: int = 0
    height: int = 0
    problem: str = ""


def embed_all(paths: Sequence[Path]) -> list[Picture]:
    """A picture for each path, several at a time."""
    with large_images_allowed(), ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(embed, paths))


def embed(path: Path) -> Picture:
    """The image as it is seen upright, not larger than `LONGEST`; never enlarged."""
    try:
        image = open_upright(path)
    except UnreadableImage as error:
        return Picture(problem=f"{path} {error}")
    image.thumbnail((LONGEST, LONGEST))
    kind, content = min((_png(image), _jpeg(image)), key=lambda encoded: len(encoded[1]))
    src = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return Picture(src, image.width, image.height)


def _png(image: Image.Image) -> tuple[str, bytes]:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "png", file.getvalue()


def _jpeg(image: Image.Image) -> tuple[str, bytes]:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_JPEG_QUALITY)
    return "jpeg", file.getvalue()
