"""A sample's image with its objects drawn on it.

Small images are enlarged and large ones reduced, so that lines and labels are as large on all of
them. Every description has a colour of its own, the same in each picture as far as there are
colours: those of Okabe and Ito, which colour-blind people can tell apart.
"""

import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from learner.coords import decode_bin
from learner.data.fonts import Drawable, shortened
from learner.data.shapes import bounding_box
from learner.types import GroundTruthObject, Sample

# The longer side of a picture, in pixels.
LEAST, MOST = 960, 1600

Box = tuple[float, float, float, float]

PALETTE = {
    "#E69F00": "black",
    "#56B4E9": "black",
    "#009E73": "black",
    "#F0E442": "black",
    "#0072B2": "white",
    "#D55E00": "black",
    "#CC79A7": "black",
}
_FONT_SIZE = 20
_LINE = 3
_HALO = 2
# From the middle of an outline to a label beside it.
_GAP = 3
_PAD = 4
_LONGEST = 40
# How many other outlines an object's own is worth.
_OWN = 4


class Label(NamedTuple):
    """A plate with text. box: x1, y1, x2, y2 of the plate in the picture."""

    text: str
    font: Path
    box: Box


def colour_of(description: str) -> str:
    """The same for a description in every picture."""
    return list(PALETTE)[zlib.crc32(description.encode()) % len(PALETTE)]


def draw(sample: Sample, image: Image.Image) -> Image.Image:
    """image: upright, RGB. The objects are numbered as they are listed."""
    picture = _at_good_size(image)
    canvas = ImageDraw.Draw(picture)
    for item in sample.objects:
        _outline(canvas, item, picture.size)
    labels = place_labels(sample.objects, picture.size)
    for item, label in zip(sample.objects, labels, strict=True):
        _write(canvas, label, colour_of(item.desc))
    return picture


def place_labels(objects: Sequence[GroundTruthObject], size: tuple[int, int]) -> list[Label]:
    """A label for each object of a picture, numbered from 1."""
    outlines = [_frame(item, size) for item in objects]
    labels: list[Label] = []
    for number, item in enumerate(objects, start=1):
        taken = _Taken(outlines, number - 1, [label.box for label in labels])
        labels.append(_place(number, item, size, taken))
    return labels


def _at_good_size(image: Image.Image) -> Image.Image:
    longest = max(image.size)
    scale = min(max(longest, LEAST), MOST) / longest
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    if size == image.size:
        return image.copy()
    method = Image.Resampling.NEAREST if scale >= 4 else Image.Resampling.LANCZOS
    return image.resize(size, method)


def _outline(canvas: ImageDraw.ImageDraw, item: GroundTruthObject, size: tuple[int, int]) -> None:
    corners = _corners(item, size)
    closed = [*corners, *corners[:2]]
    canvas.line(closed, fill="black", width=_LINE + 2 * _HALO, joint="curve")
    canvas.line(closed, fill=colour_of(item.desc), width=_LINE, joint="curve")


def _corners(item: GroundTruthObject, size: tuple[int, int]) -> list[tuple[float, float]]:
    """Corners in the picture, in order."""
    flat = item.shape.coords
    if item.shape.kind == "bbox_2d":
        x1, y1, x2, y2 = flat
        flat = (x1, y1, x2, y1, x2, y2, x1, y2)
    return [_at(x, y, size) for x, y in zip(flat[0::2], flat[1::2], strict=True)]


def _at(x: int, y: int, size: tuple[int, int]) -> tuple[float, float]:
    """Where a point in bins is in the picture."""
    return decode_bin(x) * (size[0] - 1), decode_bin(y) * (size[1] - 1)


class _Taken(NamedTuple):
    """What a label should not hide.

    outlines: of all objects, that at `own` among them, each as the bands along its sides.
    plates: of the labels placed before.
    """

    outlines: Sequence[Sequence[Box]]
    own: int
    plates: Sequence[Box]

    def hidden_by(self, plate: Box) -> float:
        """Sum of the shares that are hidden; its own outline counts for several."""
        hidden = sum(_share(plate, bands) for bands in self.outlines)
        hidden += (_OWN - 1) * _share(plate, self.outlines[self.own])
        return hidden + sum(_share(plate, [other]) for other in self.plates)


def _frame(item: GroundTruthObject, size: tuple[int, int]) -> list[Box]:
    """The sides of an object's bounding box as they are drawn."""
    x1, y1, x2, y2 = bounding_box(item.shape)
    (left, top), (right, bottom) = _at(x1, y1, size), _at(x2, y2, size)
    half = _LINE / 2
    return [
        (left - half, top - half, right + half, top + half),
        (left - half, bottom - half, right + half, bottom + half),
        (left - half, top - half, left + half, bottom + half),
        (right - half, top - half, right + half, bottom + half),
    ]


def _place(number: int, item: GroundTruthObject, size: tuple[int, int], taken: _Taken) -> Label:
    """The label of an object, where it hides the least."""

    def fits(drawn: Drawable) -> bool:
        width = _text_size(drawn)[0] + 2 * _PAD
        return len(drawn.text) <= _LONGEST and width < size[0]

    text, font, _ = drawn = shortened(f"{number} {item.desc}", fits, keep=len(str(number)))
    width, height = (side + 2 * _PAD for side in _text_size(drawn))
    plates = [_inside(*corner, width, height, size) for corner in _spots(item, size, width, height)]
    hidden = [taken.hidden_by(plate) for plate in plates]
    return Label(text, font, plates[hidden.index(min(hidden))])


def _text_size(drawn: Drawable) -> tuple[float, float]:
    left, top, right, bottom = _font(drawn.font).getbbox(drawn.text)
    return right - left, bottom - top


def _spots(
    item: GroundTruthObject, size: tuple[int, int], width: float, height: float
) -> Iterator[tuple[float, float]]:
    """Upper left corners a label of this size may have, the best first."""
    x1, y1, x2, y2 = bounding_box(item.shape)
    (left, top), (right, bottom) = _at(x1, y1, size), _at(x2, y2, size)
    above, below = top - height - _GAP, bottom + _GAP
    for x in (left, right - width):
        yield from ((x, y) for y in (above, below))
        yield from ((x, y) for y in (top + _GAP, bottom - height - _GAP))
    beside = (right + _GAP, left - width - _GAP)
    yield from ((x, y) for x in beside for y in (top, bottom - height))
    yield from ((left, above - step * height) for step in (1, 2))
    yield from ((left, below + step * height) for step in (1, 2))


def _inside(x: float, y: float, width: float, height: float, size: tuple[int, int]) -> Box:
    """The plate moved into the picture."""
    x = max(0, min(x, size[0] - 1 - width))
    y = max(0, min(y, size[1] - 1 - height))
    return x, y, x + width, y + height


def _share(plate: Box, parts: Sequence[Box]) -> float:
    """How much of the area of the parts is under the plate, 0 to 1."""
    hidden = sum(_area(_common(plate, part)) for part in parts)
    return hidden / sum(_area(part) for part in parts)


def _common(a: Box, b: Box) -> Box:
    return max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0) * max(box[3] - box[1], 0)


def _write(canvas: ImageDraw.ImageDraw, label: Label, colour: str) -> None:
    canvas.rectangle(label.box, fill=colour, outline="black")
    left, top, _, _ = _font(label.font).getbbox(label.text)
    at = (label.box[0] + _PAD - left, label.box[1] + _PAD - top)
    canvas.text(at, label.text, fill=PALETTE[colour], font=_font(label.font))


@cache
def _font(path: Path) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, _FONT_SIZE)
