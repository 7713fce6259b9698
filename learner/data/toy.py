"""The toy world: small scenes of coloured shapes, the embedded default data set.

A scene is a square PNG with one to `MAX_OBJECTS` shapes that do not touch, e.g.

    {"images": ["images/val/00003.png"], "width": 64, "height": 64,
     "objects": [{"desc": "blue triangle", "bbox_2d": [390, 640, 874, 983]}]}

Boxes are those of the pixels that were drawn. Objects are listed from left to right by
their left edge, so that the order can be learnt. Scene i of a split depends on (seed,
split, i) alone: the same seed gives the same bytes, and more scenes keep the first ones.

With `polygons` a triangle is annotated by its corners instead, its top first and then
clockwise, so that this order can be learnt, too:

    {"desc": "blue triangle", "poly": [632, 640, 874, 983, 390, 983]}
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from learner.data.coco import write_coco
from learner.data.jsonl import read_samples
from learner.runs.atomic_files import publish_directory
from learner.stages.coords import encode_bin
from shared_contracts.errors import ContractError

IMAGE_SIDE = 64
MAX_OBJECTS = 2
MIN_OBJECT_SIDE = 18
MAX_OBJECT_SIDE = 32
GAP = 2

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 220, 50),
}
SHAPES = ("rectangle", "triangle")
DESCRIPTIONS = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
PROMPT = "Detect every object in the image."

SPLITS = ("train", "val")

Box = tuple[int, int, int, int]
Corners = tuple[float, ...]


@dataclass(frozen=True)
class ToyData:
    """Where the files of a toy data set are."""

    train_jsonl: Path
    val_jsonl: Path
    coco_train: Path
    coco_val: Path

    @classmethod
    def under(cls, directory: Path) -> "ToyData":
        return cls(
            train_jsonl=directory / "train.jsonl",
            val_jsonl=directory / "val.jsonl",
            coco_train=directory / "coco_train.json",
            coco_val=directory / "coco_val.json",
        )


@dataclass(frozen=True)
class SceneObject:
    """desc: `red triangle`; box: x1, y1, x2, y2 in pixels, x2 and y2 one past the last.

    corners: of a triangle, x and y in pixels by turns; None of a rectangle.
    """

    desc: str
    box: Box
    corners: Corners | None


def make_data(out: Path, train: int, val: int, seed: int, *, polygons: bool = False) -> ToyData:
    """Write `train` and `val` scenes with their JSONL and COCO files under `out`.

    polygons: triangles are annotated as such, rectangles as boxes; the images are the same.

    Raises:
        ContractError: a count below 1, a negative seed, or `out` not empty.
    """
    _require_at_least("train", train, 1)
    _require_at_least("val", val, 1)
    _require_at_least("seed", seed, 0)
    with publish_directory(out) as part:
        files = ToyData.under(part)
        _write_split(part, files.train_jsonl, "train", train, seed, polygons)
        _write_split(part, files.val_jsonl, "val", val, seed, polygons)
        write_coco(read_samples(files.train_jsonl, allow_poly=polygons), part, files.coco_train)
        write_coco(read_samples(files.val_jsonl, allow_poly=polygons), part, files.coco_val)
    return ToyData.under(out)


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ContractError(
            f"toy make-data --{name}",
            f"{value}",
            f"Give a whole number of at least {least}.",
        )


def _write_split(
    root: Path, jsonl: Path, split: str, count: int, seed: int, polygons: bool
) -> None:
    (root / "images" / split).mkdir(parents=True)
    lines = []
    for index in range(count):
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        image, objects = make_scene(rng)
        name = f"images/{split}/{index:05d}.png"
        image.save(root / name)
        lines.append(json.dumps(_record(name, objects, polygons)) + "\n")
    jsonl.write_text("".join(lines), encoding="utf-8")


def _record(image_name: str, objects: list[SceneObject], polygons: bool) -> dict[str, object]:
    return {
        "images": [image_name],
        "width": IMAGE_SIDE,
        "height": IMAGE_SIDE,
        "objects": [{"desc": o.desc} | _geometry(o, polygons) for o in objects],
    }


def _geometry(item: SceneObject, polygons: bool) -> dict[str, list[int]]:
    if polygons and item.corners is not None:
        return {"poly": [encode_bin(v / IMAGE_SIDE) for v in item.corners]}
    return {"bbox_2d": [encode_bin(v / IMAGE_SIDE) for v in item.box]}


def make_scene(rng: np.random.Generator) -> tuple[Image.Image, list[SceneObject]]:
    """Draw one scene; its objects come from left to right."""
    background = int(rng.integers(0, 64))
    image = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), (background,) * 3)
    objects = []
    for box in _place_boxes(rng, int(rng.integers(1, MAX_OBJECTS + 1))):
        colour = str(rng.choice(list(COLOURS)))
        shape = str(rng.choice(SHAPES))
        mask = _shape_mask(shape, box)
        image.paste(COLOURS[colour], mask=Image.fromarray(mask))
        drawn = _mask_box(mask)
        corners = _triangle(drawn) if shape == "triangle" else None
        objects.append(SceneObject(f"{colour} {shape}", drawn, corners))
    objects.sort(key=lambda o: o.box)
    return image, objects


def _place_boxes(rng: np.random.Generator, count: int) -> list[Box]:
    """Draw `count` boxes at least `GAP` pixels apart, starting over when one finds no room."""
    boxes: list[Box] = []
    while len(boxes) < count:
        width, height = (int(v) for v in rng.integers(MIN_OBJECT_SIDE, MAX_OBJECT_SIDE + 1, 2))
        x = int(rng.integers(0, IMAGE_SIDE - width + 1))
        y = int(rng.integers(0, IMAGE_SIDE - height + 1))
        box = (x, y, x + width, y + height)
        boxes = [] if any(_too_close(box, other) for other in boxes) else [*boxes, box]
    return boxes


def _too_close(a: Box, b: Box) -> bool:
    apart_x = a[2] + GAP <= b[0] or b[2] + GAP <= a[0]
    apart_y = a[3] + GAP <= b[1] or b[3] + GAP <= a[1]
    return not (apart_x or apart_y)


def _shape_mask(shape: str, box: Box) -> npt.NDArray[np.uint8]:
    """255 where the shape is, 0 elsewhere; IMAGE_SIDE x IMAGE_SIDE."""
    canvas = Image.new("L", (IMAGE_SIDE, IMAGE_SIDE), 0)
    draw = ImageDraw.Draw(canvas)
    x1, y1, x2, y2 = box[0], box[1], box[2] - 1, box[3] - 1
    if shape == "rectangle":
        draw.rectangle((x1, y1, x2, y2), fill=255)
    else:
        draw.polygon([((x1 + x2) // 2, y1), (x2, y2), (x1, y2)], fill=255)
    return np.asarray(canvas)


def _triangle(box: Box) -> Corners:
    """Corners of the triangle that fills a box: the middle of its top pixel, then clockwise."""
    x1, y1, x2, y2 = box
    return ((x1 + x2 - 1) // 2 + 0.5, y1, x2, y2, x1, y2)


def _mask_box(mask: npt.NDArray[np.uint8]) -> Box:
    columns = np.flatnonzero(mask.any(axis=0))
    rows = np.flatnonzero(mask.any(axis=1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
