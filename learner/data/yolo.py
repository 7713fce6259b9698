"""Data sets in the layout of Ultralytics YOLO: boxes as fractions of their image.

    data.yaml                  names of the classes, and image folders or lists of each split
    images/train/a.jpg         an image
    labels/train/a.txt         `class x_centre y_centre width height` a line, or `class x1 y1 x2 y2
                               x3 y3 ...` for a polygon

Labels are read as fractions of the upright image, which OpenCV gives to Ultralytics. They have no
image size that could confirm it.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from learner.config.yaml12 import dump_mapping
from learner.data.coco import pixel_xywh
from learner.data.files import DATA_YAML, read_text
from learner.data.jsonl import bounding_box
from learner.data.records import Account, Annotation, Rule, Source, SourceImage, bounding_xywh
from learner.stages.tokens import decode_bin
from learner.types import Sample, Shape
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import shown

IMAGES = "images/train"
_SPLITS = ("train", "val", "test")
# Image suffixes of Ultralytics. Images in formats that Rollmatch cannot decode are counted.
_SUFFIXES = (
    *(".avif", ".bmp", ".dng", ".gif", ".heic", ".heif", ".jp2", ".jpeg", ".jpeg2000"),
    *(".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp"),
)
# Largest excess over 0 to 1 of a fraction that counts as rounding.
_ROUNDING = 0.01


def read_yolo(path: Path, split: str | None) -> Source:
    """Read a data set. path: `data.yaml`, or its folder. split: required if the YAML has several.

    Raises ContractError for faults of the YAML, and if no image has labels.
    """
    file = path / DATA_YAML if path.is_dir() else path
    mapping = _mapping(file)
    names = _class_names(file, mapping)
    images = dict.fromkeys(_images(file, mapping, split))
    if not any(_labels_of(image).is_file() for image in images):
        would = "".join(f"; the first would be {_labels_of(image)}" for image in list(images)[:1])
        found = f"none of {len(images)} images has a file of labels{would}"
        do = "Put labels into a folder `labels` beside `images`."
        raise ContractError(str(file), found, do)
    folder = file.parent.absolute()
    pictures = []
    for image in images:
        name, labels = os.path.relpath(image, folder), _labels_of(image)
        text = read_text(labels, "Save it as UTF-8.") if labels.is_file() else ""
        annotations = [
            _annotation(f"{os.path.relpath(labels, folder)}:{number}", name, line, names)
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]
        pictures.append(SourceImage(name, name, None, annotations))
    return Source(folder, pictures, Account())


def _mapping(file: Path) -> dict[str, Any]:
    do = f"Name a {DATA_YAML} with `names` and `train`, or its folder."
    try:
        # The base loader keeps scalars as text: `no` is a class name.
        mapping = YAML(typ="base", pure=True).load(read_text(file, do))
    except (YAMLError, RecursionError) as error:
        found = f"it is no YAML ({' '.join(str(error).split())})"
        raise ContractError(str(file), found, do) from error
    if not isinstance(mapping, dict):
        raise ContractError(str(file), f"it holds {shown(mapping)}", do)
    if "kpt_shape" in mapping:
        found = "the labels have key points"
        raise ContractError(f"{file}: kpt_shape", found, "Only boxes and polygons are read.")
    return mapping


def _class_names(file: Path, mapping: dict[str, Any]) -> dict[int, Any]:
    names = mapping.get("names")
    if isinstance(names, list):
        return dict(enumerate(names))
    if not isinstance(names, dict) or not all(str(i).isdecimal() for i in names):
        do = "List the names of the classes, or map 0, 1, ... to them."
        raise ContractError(f"{file}: names", f"it is {shown(names)}", do)
    return {int(index): name for index, name in names.items()}


def _images(file: Path, mapping: dict[str, Any], split: str | None) -> Iterator[Path]:
    places = {
        name: [_posix(place) for place in (value if isinstance(value, list) else [value])]
        for name in _SPLITS
        if (value := mapping.get(name))
    }
    if split is None:
        if len(set(map(tuple, places.values()))) > 1:
            found = f"{file} has {', '.join(places)}"
            raise ContractError("--split", found, "Name one: each is a data file.")
        split = next(iter(places), "train")
    if split not in places:
        do = f"Name a folder of images there, or give --split {'|'.join(places) or 'train'}."
        raise ContractError(f"{file}: {split}", "it is missing", do)
    root = file.parent / _posix(mapping.get("path", ""))
    for place in places[split]:
        # Roboflow exports have `../train/images` for a folder beside `data.yaml`.
        inside = file.parent / place.removeprefix("../")
        images = next((p for p in (root / place, file.parent / place, inside) if p.exists()), None)
        if images is None:
            do = "Name a folder of images, or a list of them."
            raise ContractError(f"{file}: {split}", f"{root / place} is not there", do)
        yield from _of_folder(images) if images.is_dir() else _of_list(images)


def _of_folder(folder: Path) -> Iterator[Path]:
    """Yield images sorted by path; then a missing image for each label file without one."""
    folder = Path(os.path.normpath(folder.absolute()))
    images = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES)
    yield from images
    labels = _labels_of(folder / "any").parent
    for file in sorted({*labels.rglob("*.txt")}.difference(map(_labels_of, images))):
        if file.name != "classes.txt":
            yield folder / file.relative_to(labels).with_suffix("")


def _of_list(file: Path) -> Iterator[Path]:
    """Yield the images that a text file lists; relative paths start at its folder."""
    for name in filter(None, map(str.strip, read_text(file, "List images.").splitlines())):
        yield Path(os.path.normpath((file.parent / _posix(name)).absolute()))


def _posix(path: Any) -> str:
    return str(path).replace("\\", "/")


def _labels_of(image: Path) -> Path:
    """Return the label file: the last folder `images` becomes `labels`, if there is one."""
    before, found, after = str(image).rpartition(f"{os.sep}images{os.sep}")
    path = f"{before}{os.sep}labels{os.sep}{after}" if found else str(image)
    return Path(path).with_suffix(".txt")


def _annotation(place: str, image: str, line: str, names: dict[int, Any]) -> Annotation:
    box: Any = line.strip()
    polygon = None
    try:
        category, *values = map(float, line.split())
    except ValueError:
        category, values = -1.0, []
    if all(-_ROUNDING <= value <= 1 + _ROUNDING for value in values):  # else pixels
        if len(values) == 4:
            x, y, width, height = values
            box = (x - width / 2, y - height / 2, width, height)
        elif len(values) >= 6 and len(values) % 2 == 0:
            polygon, box = values, bounding_xywh(values)
    fault = None if category in names else Rule.UNKNOWN_CATEGORY
    name = None if fault else names[int(category)]
    stated = {"scale": "0..1", "corners": "xywh"}
    return Annotation.read(place, image, name, box, fault, polygon=polygon, **stated)


def yolo_texts(samples: Sequence[Sample], names: Sequence[str], polygons: bool) -> dict[str, str]:
    """Return the text files of a data set by their paths.

    names: file names of the images in `IMAGES`, with distinct stems.
    polygons: write all objects as polygons, else as boxes; Ultralytics does not mix them.
    """
    classes = sorted({o.desc for sample in samples for o in sample.objects})
    numbers = {desc: number for number, desc in enumerate(classes)}
    # Ultralytics requires `val`.
    texts = {DATA_YAML: dump_mapping({"train": IMAGES, "val": IMAGES, "names": classes})}
    for sample, name in zip(samples, names, strict=True):
        lines = (
            " ".join([str(numbers[o.desc]), *(f"{v:.8g}" for v in _fractions(o.shape, polygons))])
            for o in sample.objects
        )
        texts[f"labels/train/{Path(name).stem}.txt"] = "".join(f"{line}\n" for line in lines)
    return texts


def _fractions(shape: Shape, polygons: bool) -> list[float]:
    if not polygons:
        x, y, width, height = pixel_xywh(shape, 1, 1)
        return [x + width / 2, y + height / 2, width, height]
    if shape.kind == "poly":
        return [decode_bin(k) for k in shape.coords]
    x1, y1, x2, y2 = (decode_bin(k) for k in bounding_box(shape))
    return [x1, y1, x2, y1, x2, y2, x1, y2]
