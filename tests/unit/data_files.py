"""Data files and images that the tests of `learner data` write."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from learner.data.checkpoint import Checkpoint, SampleLengths, TokenLimits
from learner.stages.formats.coord_json import serialize_objects
from learner.types import GroundTruthObject

Line = dict[str, Any] | str

LYING = 6  # EXIF orientation of a portrait that is stored as a landscape


def box(desc: str, *coords: int) -> dict[str, Any]:
    return {"desc": desc, "bbox_2d": list(coords)}


def line(image: str, *objects: dict[str, Any], size: tuple[int, int] = (64, 48)) -> dict[str, Any]:
    return {"images": [image], "width": size[0], "height": size[1], "objects": list(objects)}


def write_lines(path: Path, *lines: Line) -> Path:
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def paint(
    path: Path,
    size: tuple[int, int] = (64, 48),
    colour: tuple[int, int, int] = (0, 90, 160),
    orientation: int | None = None,
) -> Path:
    """An image file; orientation: EXIF's."""
    image = Image.new("RGB", size, colour)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    image.save(path, exif=exif)
    return path


def paint_all(folder: Path, names: Sequence[str]) -> None:
    """Images of one size, no two alike."""
    for index, name in enumerate(names):
        paint(folder / name, colour=(index, 255 - index, 0))


def lengths_of(
    checkpoint: Path, limits: TokenLimits, prompt: str = "Go", system: str | None = None
) -> SampleLengths:
    def write(objects: Sequence[GroundTruthObject]) -> str:
        return serialize_objects(objects, "desc_first")

    return SampleLengths(Checkpoint(checkpoint), write, prompt, system, limits)
