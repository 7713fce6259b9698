"""Toy data: images of coloured shapes, and their data files.

    plain    64 pixels; one or two large shapes that do not overlap, listed from left to right
    crowded  128 pixels; 6 to 20 shapes of 6 to 60 pixels that overlap, of 2 to 4 descriptions;
             listed in random order
    distinct 128 pixels; 3 to 8 such shapes with distinct descriptions; pretraining for `crowded`

A scene is a square PNG, e.g.

    {"images": ["images/val/00003.png"], "width": 64, "height": 64,
     "objects": [{"desc": "blue triangle", "bbox_2d": [390, 640, 874, 983]}]}

Boxes enclose the visible pixels. Scene i of a split depends only on (world, seed, split, i): the
same seed gives the same bytes, and a larger count keeps the first scenes.

With `polygons`, triangles are annotated by their corners: the top, then clockwise.

    {"desc": "blue triangle", "poly": [632, 640, 874, 983, 390, 983]}
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy.ndimage import binary_erosion

from learner.data.coco import json_text, to_coco
from learner.data.files import write_lines
from learner.data.jsonl import read_samples
from learner.runs.atomic_files import publish_directory, publish_text
from learner.stages.tokens import encode_bin
from shared_contracts.errors import ContractError

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 220, 50),
}
SHAPES = ("rectangle", "triangle")
DESCRIPTIONS = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
Box = tuple[int, int, int, int]
Mask = npt.NDArray[np.bool_]


class SceneObject(NamedTuple):
    """desc: such as `red triangle`. box: x1, y1, x2, y2 in pixels; x2, y2 exclusive."""

    desc: str
    box: Box

    @property
    def corners(self) -> tuple[float, ...] | None:
        """x, y, ... of a triangle that no other shape hides; None for a rectangle.

        The first is the middle of the top pixel, the others follow clockwise.
        """
        x1, y1, x2, y2 = self.box
        triangle = ((x1 + x2 - 1) // 2 + 0.5, y1, x2, y2, x1, y2)
        return triangle if self.desc.endswith("triangle") else None


Scene = tuple[Image.Image, list[SceneObject]]
WorldName = Literal["plain", "distinct", "crowded"]
# Of the plain world.
IMAGE_SIDE = 64
MAX_OBJECTS = 2
MIN_OBJECT_SIDE = 18
MAX_OBJECT_SIDE = 32
GAP = 2
# Of the others.
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
    """A shape in its box. whole: all its pixels; seen: the visible ones; (side, side)."""

    desc: str
    box: Box
    side: int

    def __post_init__(self) -> None:
        canvas = Image.new("1", (self.side, self.side))
        draw = ImageDraw.Draw(canvas)
        x1, y1, x2, y2 = self.box[0], self.box[1], self.box[2] - 1, self.box[3] - 1
        if self.desc.endswith("rectangle"):
            draw.rectangle((x1, y1, x2, y2), fill=1)
        else:
            draw.polygon([((x1 + x2) // 2, y1), (x2, y2), (x1, y2)], fill=1)
        self.whole: Mask = np.asarray(canvas)
        self.seen = self.whole


def make_scene(rng: np.random.Generator) -> Scene:
    """Draw a plain scene; objects are listed from left to right.

    All boxes are drawn again if two of them are too close.
    """
    grey, count = _grey(rng), int(rng.integers(1, MAX_OBJECTS + 1))
    boxes: list[Box] = []
    while len(boxes) < count:
        width, height = (int(v) for v in rng.integers(MIN_OBJECT_SIDE, MAX_OBJECT_SIDE + 1, 2))
        box = _random_box(rng, width, height, IMAGE_SIDE)
        boxes = [*boxes, box] if all(_apart(box, other) for other in boxes) else []
    placed = []
    for box in boxes:
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        placed.append(_Placed(f"{colour} {shape}", box, IMAGE_SIDE))
    image, objects = _paint(grey, placed, outline=False)
    return image, sorted(objects, key=lambda o: o.box)


def _apart(a: Box, b: Box) -> bool:
    return any(a[i + 2] + GAP <= b[i] or b[i + 2] + GAP <= a[i] for i in (0, 1))


def make_crowded_scene(rng: np.random.Generator) -> Scene:
    kinds = rng.choice(DESCRIPTIONS, int(rng.integers(2, MOST_KINDS + 1)), replace=False).tolist()

    def candidate(placed: list[_Placed]) -> _Placed:
        if placed and rng.random() < CLUSTERED_SHARE:
            return _beside(rng, placed[int(rng.integers(len(placed)))])
        return _anywhere(rng, str(rng.choice(kinds)))

    return _overlapping(rng, candidate, int(rng.integers(FEWEST, MOST + 1)))


def make_distinct_scene(rng: np.random.Generator) -> Scene:
    kinds = rng.permutation(DESCRIPTIONS).tolist()
    count = int(rng.integers(FEWEST_DISTINCT, len(kinds) + 1))
    return _overlapping(rng, lambda placed: _anywhere(rng, kinds[len(placed)]), count)


def _overlapping(
    rng: np.random.Generator, candidate: Callable[[list[_Placed]], _Placed], count: int
) -> Scene:
    """Draw shapes from bottom to top; rejects candidates that hide or resemble others too much."""
    grey = _grey(rng)
    placed: list[_Placed] = []
    while len(placed) < count:
        new = candidate(placed)
        left = [other.seen & ~new.whole for other in placed]
        hidden = (
            seen.sum() < SEEN_SHARE * other.whole.sum()
            for other, seen in zip(placed, left, strict=True)
        )
        if any(hidden) or any(_alike(other, new) for other in placed):
            continue
        for other, seen in zip(placed, left, strict=True):
            other.seen = seen
        placed.append(new)
    image, objects = _paint(grey, placed, outline=True)
    return image, [objects[i] for i in rng.permutation(len(objects))]


def _beside(rng: np.random.Generator, other: _Placed) -> _Placed:
    x1, y1, x2, y2 = other.box
    width, height = x2 - x1, y2 - y1
    x = x1 + round(float(rng.uniform(-1.2, 1.2)) * width)
    y = y1 + round(float(rng.uniform(-1.2, 1.2)) * height)
    x, y = (min(max(v, 0), CROWDED_SIDE - size) for v, size in ((x, width), (y, height)))
    return _Placed(other.desc, (x, y, x + width, y + height), CROWDED_SIDE)


def _anywhere(rng: np.random.Generator, desc: str) -> _Placed:
    size = np.log([SMALLEST, LARGEST])
    half_aspect = rng.uniform(-1, 1) * np.log(WIDEST) / 2
    sides = np.exp(rng.uniform(*size) + np.array([half_aspect, -half_aspect]))
    width, height = (int(v) for v in sides.clip(SMALLEST, LARGEST).round())
    return _Placed(desc, _random_box(rng, width, height, CROWDED_SIDE), CROWDED_SIDE)


def _random_box(rng: np.random.Generator, width: int, height: int, side: int) -> Box:
    x = int(rng.integers(0, side - width + 1))
    y = int(rng.integers(0, side - height + 1))
    return (x, y, x + width, y + height)


def _alike(a: _Placed, b: _Placed) -> bool:
    both = int((a.whole & b.whole).sum())
    return a.desc == b.desc and both > MOST_ALIKE * int((a.whole | b.whole).sum())


def _grey(rng: np.random.Generator) -> int:
    return int(rng.integers(0, 64))


def _paint(grey: int, placed: list[_Placed], outline: bool) -> Scene:
    """Paint shapes on a grey ground; a black outline separates shapes of one colour."""
    image = Image.new("RGB", (placed[0].side,) * 2, (grey,) * 3)
    for each in placed:
        inner = binary_erosion(each.whole) if outline else each.whole
        image.paste(_OUTLINE, mask=Image.fromarray(each.whole))
        image.paste(COLOURS[each.desc.split()[0]], mask=Image.fromarray(inner))
    return image, [SceneObject(each.desc, _mask_box(each.seen)) for each in placed]


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
PROMPT = "Detect every object in the image."


@dataclass(frozen=True)
class ToyData:
    train_jsonl: Path
    val_jsonl: Path
    coco_train: Path
    coco_val: Path

    @classmethod
    def under(cls, directory: Path) -> "ToyData":
        names = ("train.jsonl", "val.jsonl", "coco_train.json", "coco_val.json")
        return cls(*(directory / name for name in names))


def make_data(
    out: Path,
    train: int,
    val: int,
    seed: int,
    *,
    world: WorldName = "plain",
    polygons: bool = False,
    unlabelled: float = 0.0,
) -> ToyData:
    """Write `train` and `val` scenes with their JSONL and COCO files under `out`.

    polygons: annotate triangles by corners, rectangles by boxes; the images are the same.
    unlabelled: probability that an object of a training line is left out; at least one object
        stays. Validation lines have every object.

    Raises ContractError for polygons in another world than plain, and if `out` is not empty.
    """
    if polygons and world != "plain":
        found = f"--world {world}, where parts of triangles are hidden"
        raise ContractError("toy make-data --polygons", found, "Leave one of the two out.")
    side, make_scene = WORLDS[world]
    with publish_directory(out) as part:
        files = ToyData.under(part)
        splits = (
            ("train", train, unlabelled, files.train_jsonl, files.coco_train),
            ("val", val, 0.0, files.val_jsonl, files.coco_val),
        )
        for number, (split, count, share, jsonl, coco) in enumerate(splits):
            (part / "images" / split).mkdir(parents=True)
            lines = []
            for index in range(count):
                rng = np.random.default_rng([seed, number, index])
                image, objects = make_scene(rng)
                name = f"images/{split}/{index:05d}.png"
                image.save(part / name)
                labels = [_label(o, side, polygons) for o in _labelled(objects, share, rng)]
                lines.append({"images": [name], "width": side, "height": side, "objects": labels})
            write_lines(jsonl, lines)
            document = to_coco(read_samples(jsonl, allow_poly=polygons), part)
            publish_text(coco, json_text(document))
    return ToyData.under(out)


def _label(item: SceneObject, side: int, polygons: bool) -> dict[str, object]:
    corners = item.corners if polygons else None
    bins = [encode_bin(v / side) for v in corners or item.box]
    return {"desc": item.desc, "bbox_2d" if corners is None else "poly": bins}


def _labelled(
    objects: list[SceneObject], unlabelled: float, rng: np.random.Generator
) -> list[SceneObject]:
    """Return a random subset of the objects; that with the largest draw always stays."""
    chances = rng.random(len(objects))
    kept = chances >= min(unlabelled, chances.max())
    return [each for each, stays in zip(objects, kept, strict=True) if stays]
