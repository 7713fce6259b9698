"""Scenes of the toy worlds: coloured shapes on a dark background, with boxes.

    plain    64 pixels; one or two large shapes that do not overlap, listed from left to right
    crowded  128 pixels; 6 to 20 shapes of 6 to 60 pixels that overlap, of 2 to 4 descriptions;
             listed in random order
    distinct 128 pixels; 3 to 8 such shapes with distinct descriptions; pretraining for `crowded`

A box encloses the visible pixels of a shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 220, 50),
}
SHAPES = ("rectangle", "triangle")
DESCRIPTIONS = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)

Box = tuple[int, int, int, int]
Corners = tuple[float, ...]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SceneObject:
    """desc: such as `red triangle`. box: x1, y1, x2, y2 in pixels; x2, y2 exclusive.

    corners: x, y, ... of a triangle in pixels; None for a rectangle and if shapes overlap.
    """

    desc: str
    box: Box
    corners: Corners | None


Scene = tuple[Image.Image, list[SceneObject]]
WorldName = Literal["plain", "distinct", "crowded"]


# --- plain

IMAGE_SIDE = 64
MAX_OBJECTS = 2
MIN_OBJECT_SIDE = 18
MAX_OBJECT_SIDE = 32
GAP = 2


def make_scene(rng: np.random.Generator) -> Scene:
    """Draw one scene; objects are listed from left to right."""
    image = _ground(rng, IMAGE_SIDE)
    objects = []
    for box in _place_boxes(rng, int(rng.integers(1, MAX_OBJECTS + 1))):
        colour = str(rng.choice(list(COLOURS)))
        shape = str(rng.choice(SHAPES))
        mask = _shape_mask(shape, box, IMAGE_SIDE)
        _paint(image, mask, COLOURS[colour])
        drawn = _mask_box(mask)
        corners = _triangle(drawn) if shape == "triangle" else None
        objects.append(SceneObject(f"{colour} {shape}", drawn, corners))
    objects.sort(key=lambda o: o.box)
    return image, objects


def _place_boxes(rng: np.random.Generator, count: int) -> list[Box]:
    """Draw `count` boxes at least `GAP` pixels apart; restarts if two are too close."""
    boxes: list[Box] = []
    while len(boxes) < count:
        width, height = (int(v) for v in rng.integers(MIN_OBJECT_SIDE, MAX_OBJECT_SIDE + 1, 2))
        box = _random_box(rng, width, height, IMAGE_SIDE)
        boxes = [] if any(_too_close(box, other) for other in boxes) else [*boxes, box]
    return boxes


def _too_close(a: Box, b: Box) -> bool:
    apart_x = a[2] + GAP <= b[0] or b[2] + GAP <= a[0]
    apart_y = a[3] + GAP <= b[1] or b[3] + GAP <= a[1]
    return not (apart_x or apart_y)


# --- distinct and crowded

CROWDED_SIDE = 128
FEWEST, MOST = 6, 20
FEWEST_DISTINCT = 3
SMALLEST, LARGEST = 6, 60
# Largest aspect ratio.
WIDEST = 2.0
MOST_KINDS = 4
# Smallest visible share of a shape's pixels.
SEEN_SHARE = 0.5
# Largest IoU of two shapes with one description; above, they would look like a duplicate.
MOST_ALIKE = 0.7
# Probability that a shape is put beside an earlier one, with its description and size.
CLUSTERED_SHARE = 0.5
_OUTLINE = (0, 0, 0)


@dataclass
class _Placed:
    """whole: all pixels of the shape; seen: the visible ones."""

    desc: str
    box: Box
    whole: Mask
    seen: Mask


def make_crowded_scene(rng: np.random.Generator) -> Scene:
    """Draw one scene; objects are listed in random order."""
    kinds = rng.choice(DESCRIPTIONS, int(rng.integers(2, MOST_KINDS + 1)), replace=False).tolist()

    def candidate(placed: list[_Placed]) -> _Placed:
        if placed and rng.random() < CLUSTERED_SHARE:
            return _beside(rng, placed[int(rng.integers(len(placed)))])
        return _anywhere(rng, str(rng.choice(kinds)))

    return _overlapping(rng, candidate, int(rng.integers(FEWEST, MOST + 1)))


def make_distinct_scene(rng: np.random.Generator) -> Scene:
    """Draw one scene; objects are listed in random order."""
    kinds = rng.permutation(DESCRIPTIONS).tolist()
    count = int(rng.integers(FEWEST_DISTINCT, len(kinds) + 1))
    return _overlapping(rng, lambda placed: _anywhere(rng, kinds[len(placed)]), count)


def _overlapping(
    rng: np.random.Generator, candidate: Callable[[list[_Placed]], _Placed], count: int
) -> Scene:
    """Draw shapes from bottom to top; rejects candidates that hide or resemble others too much.

    A black outline separates shapes of one colour.
    """
    image = _ground(rng, CROWDED_SIDE)
    placed: list[_Placed] = []
    while len(placed) < count:
        new = candidate(placed)
        left = [(other, other.seen & ~new.whole) for other in placed]
        if any(seen.sum() < SEEN_SHARE * other.whole.sum() for other, seen in left):
            continue
        if any(_alike(other, new) for other in placed):
            continue
        for other, seen in left:
            other.seen = seen
        placed.append(new)
    for each in placed:
        colour, _ = each.desc.split()
        _paint(image, each.whole, _OUTLINE)
        _paint(image, _inner(each.whole), COLOURS[colour])
    objects = [SceneObject(each.desc, _mask_box(each.seen), None) for each in placed]
    return image, [objects[i] for i in rng.permutation(len(objects))]


def _beside(rng: np.random.Generator, other: _Placed) -> _Placed:
    """Return a shape beside another, with its description and size."""
    x1, y1, x2, y2 = other.box
    width, height = x2 - x1, y2 - y1
    x = x1 + round(float(rng.uniform(-1.2, 1.2)) * width)
    y = y1 + round(float(rng.uniform(-1.2, 1.2)) * height)
    x, y = (min(max(v, 0), CROWDED_SIDE - size) for v, size in ((x, width), (y, height)))
    return _on_top(other.desc, (x, y, x + width, y + height))


def _anywhere(rng: np.random.Generator, desc: str) -> _Placed:
    """Return a shape with uniform logarithms of size and of aspect ratio."""
    size = np.log([SMALLEST, LARGEST])
    half_aspect = rng.uniform(-1, 1) * np.log(WIDEST) / 2
    sides = np.exp(rng.uniform(*size) + np.array([half_aspect, -half_aspect]))
    width, height = (int(v) for v in sides.clip(SMALLEST, LARGEST).round())
    return _on_top(desc, _random_box(rng, width, height, CROWDED_SIDE))


def _on_top(desc: str, box: Box) -> _Placed:
    mask = _shape_mask(desc.split()[1], box, CROWDED_SIDE)
    return _Placed(desc, box, mask, mask)


def _alike(a: _Placed, b: _Placed) -> bool:
    both = int((a.whole & b.whole).sum())
    return a.desc == b.desc and both > MOST_ALIKE * int((a.whole | b.whole).sum())


def _inner(mask: Mask) -> Mask:
    """Return the pixels whose four neighbours belong to the shape, too."""
    padded = np.pad(mask, 1)
    up, down = padded[:-2, 1:-1], padded[2:, 1:-1]
    left, right = padded[1:-1, :-2], padded[1:-1, 2:]
    inner: Mask = mask & up & down & left & right
    return inner


# --- common


def _ground(rng: np.random.Generator, side: int) -> Image.Image:
    return Image.new("RGB", (side, side), (int(rng.integers(0, 64)),) * 3)


def _random_box(rng: np.random.Generator, width: int, height: int, side: int) -> Box:
    x = int(rng.integers(0, side - width + 1))
    y = int(rng.integers(0, side - height + 1))
    return (x, y, x + width, y + height)


def _paint(image: Image.Image, mask: Mask, colour: tuple[int, int, int]) -> None:
    image.paste(colour, mask=Image.fromarray(mask))


def _shape_mask(shape: str, box: Box, side: int) -> Mask:
    """Return the mask of a shape; (side, side)."""
    canvas = Image.new("1", (side, side))
    draw = ImageDraw.Draw(canvas)
    x1, y1, x2, y2 = box[0], box[1], box[2] - 1, box[3] - 1
    if shape == "rectangle":
        draw.rectangle((x1, y1, x2, y2), fill=1)
    else:
        draw.polygon([((x1 + x2) // 2, y1), (x2, y2), (x1, y2)], fill=1)
    return np.asarray(canvas)


def _triangle(box: Box) -> Corners:
    """Return the corners of a box's triangle: the middle of the top pixel, then clockwise."""
    x1, y1, x2, y2 = box
    return ((x1 + x2 - 1) // 2 + 0.5, y1, x2, y2, x1, y2)


def _mask_box(mask: Mask) -> Box:
    columns = np.flatnonzero(mask.any(axis=0))
    rows = np.flatnonzero(mask.any(axis=1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


# World -> side of its images in pixels, and the function that draws a scene.
WORLDS: dict[WorldName, tuple[int, Callable[[np.random.Generator], Scene]]] = {
    "plain": (IMAGE_SIDE, make_scene),
    "distinct": (CROWDED_SIDE, make_distinct_scene),
    "crowded": (CROWDED_SIDE, make_crowded_scene),
}
