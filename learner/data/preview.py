"""Pictures of samples with their objects, and a page that shows them side by side.

Small images are enlarged and large ones reduced, so that lines and labels are as large on all of
them. Every description has a colour of its own, the same in each picture as far as there are
colours: those of Okabe and Ito, which colour-blind people can tell apart.

DejaVu Sans comes with matplotlib. Where it lacks a character, the fonts of the machine are
searched for one that holds the whole text; what none of them holds is spelt `\\u732b`, so that
nothing is drawn as an empty box.
"""

import html
import unicodedata
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple
from urllib.parse import quote

import matplotlib
from matplotlib.font_manager import findSystemFonts
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

from learner.data.images import UnreadableImage, look_at, open_upright, size_told
from learner.data.jsonl import bounding_box
from learner.runs.atomic_files import publish_directory
from learner.stages.coords import decode_bin
from learner.types import GroundTruthObject, Sample
from shared_contracts.errors import ContractError, ContractErrors


class Drawable(NamedTuple):
    """A text as it can be drawn. missing: characters that no font here holds."""

    text: str
    font: Path
    missing: frozenset[str]


@cache
def drawable(text: str) -> Drawable:
    """The text with a font for it; a break or control character becomes a blank."""
    text = "".join(" " if c.isspace() or unicodedata.category(c) == "Cc" else c for c in text)
    needed = {c for c in text if not _invisible(c)}
    for font in _fonts():
        if needed <= _characters(font):
            return Drawable("".join(c for c in text if c in needed), font, frozenset())
    default = _default_font()
    missing = frozenset(needed - _characters(default))
    spelt = (_spelt(c) if c in missing else c for c in text if c in needed)
    return Drawable("".join(spelt), default, missing)


def shortened(text: str, fits: Callable[[Drawable], bool], keep: int = 0) -> Drawable:
    """The text, or as much of its beginning as fits with an ellipsis, `keep` characters at least.

    What is judged is drawn: a character that is spelt takes its ten.
    """
    whole = drawable(text)
    if fits(whole):
        return whole

    def cut(length: int) -> Drawable:
        return drawable(f"{text[:length].rstrip()}…")

    too_long = bisect_left(range(len(text)), True, keep + 1, key=lambda n: not fits(cut(n)))
    return cut(too_long - 1)


def _invisible(character: str) -> bool:
    """Joiners and variation selectors: they change how others look, and fonts may lack them."""
    return unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f"


def _spelt(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _default_font() -> Path:
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


def _fonts() -> Iterator[Path]:
    yield _default_font()
    yield from _system_fonts()


@cache
def _system_fonts() -> tuple[Path, ...]:
    return tuple(sorted(map(Path, findSystemFonts())))


@cache
def _characters(font: Path) -> frozenset[str]:
    """What a font can draw at any size; nothing for bitmaps and for files that are no fonts."""
    try:
        face = FT2Font(str(font))
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(map(chr, face.get_charmap())) if face.scalable else frozenset()


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
        hidden = sum(_fraction(plate, bands) for bands in self.outlines)
        hidden += (_OWN - 1) * _fraction(plate, self.outlines[self.own])
        return hidden + sum(_fraction(plate, [other]) for other in self.plates)


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


def _fraction(plate: Box, parts: Sequence[Box]) -> float:
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


_STYLE = """\
body { font: 15px/1.4 system-ui, sans-serif; margin: 24px; background: #f6f6f6; color: #222; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 20px; }
figure { margin: 0; background: #fff; border: 1px solid #ddd; border-radius: 6px; padding: 12px; }
img { width: 100%; height: 300px; object-fit: contain; background: #eee; }
ol { margin: 8px 0 0; padding-left: 28px; max-height: 180px; overflow: auto; }
li::marker { color: #777; } small { color: #777; }
b { display: inline-block; width: 11px; height: 11px; border: 1px solid #000; margin-right: 6px; }
"""


def choose(samples: Sequence[Sample], count: int, seed: int) -> list[Sample]:
    """`count` samples drawn by `seed` (all, if there are fewer), in the order of the file."""
    chosen = Random(seed).sample(range(len(samples)), min(count, len(samples)))
    return [samples[index] for index in sorted(chosen)]


def choose_lines(samples: Sequence[Sample], lines: Sequence[int]) -> list[Sample]:
    """The samples of these lines, counted from 1; ContractErrors for lines that are not there."""
    wrong = [line for line in lines if not 1 <= line <= len(samples)]
    if wrong:
        raise ContractErrors(
            [
                ContractError(
                    "--lines", f"there is no line {line}", f"Give lines from 1 to {len(samples)}."
                )
                for line in wrong
            ]
        )
    return [samples[line - 1] for line in lines]


def write_preview(samples: Sequence[Sample], out: Path) -> dict[str, str]:
    """Draw the first image of each sample; publish the folder, whole or not at all.

    Returns, by sample id, how an image has another size than its line says.

    Raises ContractError for an image that cannot be decoded, and where `out` is not empty.
    """
    sizes: dict[str, str] = {}
    with publish_directory(out) as part:
        for sample in samples:
            try:
                image = open_upright(sample.images[0])
            except UnreadableImage as error:
                raise ContractError(
                    sample.sample_id,
                    f"image {sample.images[0]} {error}",
                    "Replace it; `learner data check` tells all there are.",
                ) from error
            if image.size != (sample.width, sample.height):
                path = sample.images[0]
                sizes[sample.sample_id] = size_told(
                    (sample.width, sample.height), path, look_at(path)
                )
            draw(sample, image).save(part / picture_name(sample))
        page = "\n".join(_page(samples, sizes))
        (part / "index.html").write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return sizes


def picture_name(sample: Sample) -> str:
    """`train.jsonl:7` -> `train-00007.png`."""
    file, _, line = sample.sample_id.rpartition(":")
    return f"{Path(file).stem}-{int(line):05d}.png"


def undrawable(samples: Sequence[Sample]) -> frozenset[str]:
    """Characters of the descriptions that no font here holds."""
    descriptions = {o.desc for sample in samples for o in sample.objects}
    return frozenset().union(*(drawable(desc).missing for desc in descriptions))


def _page(samples: Sequence[Sample], sizes: Mapping[str, str]) -> Iterator[str]:
    yield "<!doctype html>"
    yield f'<meta charset="utf-8"><title>{len(samples)} samples</title><style>{_STYLE}</style>'
    yield "<main>"
    for sample in samples:
        yield from _figure(sample, sizes.get(sample.sample_id))
    yield "</main>"


def _figure(sample: Sample, other_size: str | None) -> Iterator[str]:
    name = quote(picture_name(sample), errors="surrogateescape")
    others = len(sample.images) - 1
    more = f", the first of {others + 1} images" if others else ""
    yield f'<figure><a href="{name}"><img src="{name}" alt=""></a><figcaption>'
    yield f"{html.escape(sample.sample_id)} <small>{sample.width}x{sample.height}{more}</small>"
    if other_size is not None:
        yield f"<p>{html.escape(other_size)}</p>"
    yield "<ol>"
    for item in sample.objects:
        plate = f'<b style="background:{colour_of(item.desc)}"></b>'
        coords = " ".join(map(str, item.shape.coords))
        yield f"<li>{plate}{html.escape(item.desc)} <small>{coords}</small></li>"
    yield "</ol></figcaption></figure>"
