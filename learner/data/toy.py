"""Toy data: images of coloured shapes (`toy_scenes.py`) with their data files.

A scene is a square PNG, e.g.

    {"images": ["images/val/00003.png"], "width": 64, "height": 64,
     "objects": [{"desc": "blue triangle", "bbox_2d": [390, 640, 874, 983]}]}

Boxes enclose the visible pixels. Scene i of a split depends only on (world, seed, split, i): the
same seed gives the same bytes, and a larger count keeps the first scenes.

With `polygons`, triangles are annotated by their corners: the top, then clockwise.

    {"desc": "blue triangle", "poly": [632, 640, 874, 983, 390, 983]}
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from learner.data.coco import json_text, to_coco
from learner.data.files import write_lines
from learner.data.jsonl import read_samples
from learner.data.toy_scenes import WORLDS, SceneObject, WorldName
from learner.runs.atomic_files import publish_directory, publish_text
from learner.stages.coords import encode_bin
from shared_contracts.errors import ContractError

PROMPT = "Detect every object in the image."


@dataclass(frozen=True)
class ToyData:
    """Paths of the files of a toy data set."""

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
