"""Data sets in the layout of Ultralytics YOLO: boxes as fractions of their image.

    data.yaml                  names of the classes, and where the images of each split are
    images/train/a.jpg         an image
    labels/train/a.txt         `class x_centre y_centre width height` a line, or `class x1 y1 x2 y2
                               x3 y3 ...` for a polygon

read_yolo    such a data set -> `CocoFile`, or all that is wrong with it
write_yolo   samples -> such a data set, with copies of their images

Labels have no size of their image, so nothing tells whether they were made for the stored or for
the upright image. They are taken as of the upright one, as OpenCV shows it to Ultralytics.
"""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from learner.data.coco import CocoAnnotation, CocoCategory, CocoFile, CocoImage, pixel_xywh
from learner.data.images import Look, Watch, look_at_all, look_at_header
from learner.data.jsonl import DataProblem, bounding_box, brief, capped, is_description
from learner.runs.atomic_files import publish_directory, writing
from learner.stages.coords import decode_bin
from learner.types import Sample, Shape
from shared_contracts.errors import ContractError

YAML = "data.yaml"
_SPLITS = ("train", "val", "test")
# What Ultralytics takes for an image. A model here may still refuse its format, which is counted.
_SUFFIXES = (
    *(".avif", ".bmp", ".dng", ".gif", ".heic", ".heif", ".jp2", ".jpeg", ".jpeg2000"),
    *(".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp"),
)
# Fractions that stick out of 0 to 1 by less were only rounded.
_ROUNDING = 0.01
_BOX, _LEAST_POLYGON = 5, 7
_LINE = "Write `class x_centre y_centre width height`, or `class x1 y1 x2 y2 x3 y3 ...`"
_DECIMALS = 8


class _Texts(yaml.BaseLoader):
    """Every scalar is a text, so that a class may be called `no`; a key is given once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.constructor.ConstructorError(
                None, None, "a key is given twice", node.start_mark
            )
        return mapping


class Pictured(NamedTuple):
    """An image, and the file of its labels, which may be absent."""

    image: Path
    labels: Path


def read_yolo(path: Path, split: str | None, watch: Watch) -> CocoFile:
    """Read a data set; file names are relative to the folder of its YAML where they can be.

    path: `data.yaml`, or its folder. split: needed where the YAML has several.

    Raises ContractErrors for all that is wrong with the YAML, or else with the labels.
    """
    file = path / YAML if path.is_dir() else path
    mapping = _mapping(file)
    categories = _categories(file, mapping)
    pictures = _pictures(file, mapping, split)
    if not any(picture.labels.is_file() for picture in pictures):
        would = f"; the first would be {pictures[0].labels}" if pictures else ""
        raise ContractError(
            str(file),
            f"none of {len(pictures)} images has a file of labels{would}",
            "Put labels into a folder `labels` beside `images`.",
        )
    problems: list[ContractError] = []
    images: list[CocoImage] = []
    annotations: list[CocoAnnotation] = []
    paths = [picture.image for picture in pictures]
    looks = watch(look_at_all(paths, look_at_header), len(paths))
    for picture, (_, look) in zip(pictures, looks, strict=True):
        width, height = look.size if isinstance(look, Look) else (1, 1)  # it is left out
        name = _name(picture.image, file.parent)
        images.append(CocoImage(id=name, file_name=name, width=width, height=height))
        for number, line in _lines(picture.labels, problems):
            where = f"{picture.labels}:{number}"
            fields = _numbers(where, line, problems)
            if fields is not None:
                place = f"{_name(picture.labels, file.parent)}:{number}"
                annotations.append(_annotation(fields, place, name, (width, height)))
    if problems:
        raise capped(str(file), problems)
    return CocoFile(images=tuple(images), annotations=tuple(annotations), categories=categories)


def _mapping(file: Path) -> dict[str, Any]:
    do = f"Name a {YAML} with `names` and `train`, or its folder."
    try:
        mapping = yaml.load(file.read_text(encoding="utf-8-sig"), _Texts)
    except OSError as error:
        raise ContractError(str(file), f"it cannot be read ({error.strerror})", do) from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        told = " ".join(str(error).split())
        raise ContractError(str(file), f"it is no YAML ({told})", do) from error
    if not isinstance(mapping, dict):
        raise ContractError(str(file), f"it holds {brief(mapping)}", do)
    if "kpt_shape" in mapping:
        raise ContractError(
            f"{file}: kpt_shape", "the labels have key points", "Only boxes and polygons are read."
        )
    return mapping


def _categories(file: Path, mapping: dict[str, Any]) -> tuple[CocoCategory, ...]:
    names = mapping.get("names")
    if isinstance(names, list):
        names = {str(index): name for index, name in enumerate(names)}
    if not isinstance(names, dict) or not names:
        raise ContractError(
            f"{file}: names",
            f"it is {brief(names)}",
            "List the names of the classes, or map 0, 1, ... to them.",
        )
    problems = []
    for index, name in names.items():
        if not (index.isascii() and index.isdecimal()):
            problems.append(
                ContractError(
                    f"{file}: names", f"the class {brief(index)}", "Count classes from 0."
                )
            )
        elif not is_description(name):
            problems.append(
                ContractError(
                    f"{file}: names[{index}]",
                    f"{brief(name)} cannot be the description of an object",
                    "Give a name in Unicode text, not blank, without special tokens like "
                    "<|im_end|>.",
                )
            )
    if problems:
        raise capped(str(file), problems)
    return tuple(CocoCategory(id=int(index), name=name) for index, name in names.items())


def _pictures(file: Path, mapping: dict[str, Any], split: str | None) -> list[Pictured]:
    places = {name: _as_list(mapping[name]) for name in _SPLITS if mapping.get(name)}
    if split is None:
        if len({tuple(value) for value in places.values()}) > 1:
            raise ContractError(
                "--split", f"{file} has {', '.join(places)}", "Name one: each is a data file."
            )
        split = next(iter(places), "train")
    if split not in places:
        raise ContractError(
            f"{file}: {split}",
            "it is missing",
            f"Name a folder of images there, or give --split {'|'.join(places) or 'train'}.",
        )
    root = file.parent / mapping.get("path", "")
    found: dict[Path, Pictured] = {}
    for index, place in enumerate(places[split]):
        where = f"{file}: {split}[{index}]"
        # Some exports name the folder from one beside it.
        inside = file.parent / place.removeprefix("../")
        there = next((p for p in (root / place, file.parent / place, inside) if p.exists()), None)
        if there is None:
            raise ContractError(
                where, f"{root / place} is not there", "Name a folder of images, or a list of them."
            )
        for picture in _of_folder(there) if there.is_dir() else _of_list(there):
            found.setdefault(picture.image, picture)
    return list(found.values())


def _as_list(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _of_folder(folder: Path) -> Iterator[Pictured]:
    """Images in the order of their names; then, without an image, labels that are left over."""
    folder = Path(os.path.normpath(folder.absolute()))
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES)
    pictures = [Pictured(image, _labels_of(image)) for image in files]
    yield from pictures
    used = {picture.labels for picture in pictures}
    labels = _labels_of(folder / "any").parent
    for left in sorted(labels.rglob("*.txt")):
        if left not in used and left.name != "classes.txt":
            yield Pictured(folder / left.relative_to(labels).with_suffix(""), left)


def _of_list(file: Path) -> Iterator[Pictured]:
    """Images that a text file lists; those that begin with `./` are relative to it."""
    try:
        names = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(str(file), f"it cannot be read ({error})", "List images.") from error
    for name in filter(None, map(str.strip, names)):
        image = Path(os.path.normpath((file.parent / name).absolute()))
        yield Pictured(image, _labels_of(image))


def _labels_of(image: Path) -> Path:
    """`labels` in place of the last folder `images`; beside the image where there is none."""
    before, found, after = str(image).rpartition(f"{os.sep}images{os.sep}")
    path = f"{before}{os.sep}labels{os.sep}{after}" if found else str(image)
    return Path(path).with_suffix(".txt")


def _name(path: Path, folder: Path) -> str:
    folder = folder.absolute()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _lines(labels: Path, problems: list[ContractError]) -> Iterator[tuple[int, str]]:
    try:
        text = labels.read_text(encoding="utf-8-sig") if labels.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        problems.append(ContractError(str(labels), f"it cannot be read ({error})", _LINE))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _numbers(where: str, line: str, problems: list[ContractError]) -> list[float] | None:
    try:
        fields = [float(word) for word in line.split()]
    except ValueError:
        fields = []
    if (
        not (len(fields) == _BOX or (len(fields) >= _LEAST_POLYGON and len(fields) % 2))
        or not all(map(math.isfinite, fields))
        or fields[0] < 0
        or not fields[0].is_integer()
    ):
        problems.append(DataProblem("label", where, brief(line.strip()), f"{_LINE}."))
        return None
    if not all(-_ROUNDING <= value <= 1 + _ROUNDING for value in fields[1:]):
        problems.append(
            DataProblem(
                "label",
                where,
                f"{brief(line.strip())} has a value that is no fraction of the image",
                "Divide x by the width and y by the height of the image: 0 to 1.",
            )
        )
        return None
    return fields


def _annotation(
    fields: Sequence[float], place: str, image: str, size: tuple[int, int]
) -> CocoAnnotation:
    category, *values = fields
    scaled = [value * size[i % 2] for i, value in enumerate(values)]
    segmentation = None
    if len(values) == _BOX - 1:
        x, y, width, height = scaled
        box = (x - width / 2, y - height / 2, width, height)
    else:
        xs, ys = scaled[0::2], scaled[1::2]
        box = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
        segmentation = [scaled]
    return CocoAnnotation(
        id=place, image_id=image, category_id=int(category), bbox=box, segmentation=segmentation
    )


def write_yolo(
    samples: Sequence[Sample], names: Sequence[PurePosixPath], out: Path, *, polygons: bool
) -> None:
    """Make the folder `out`, whole or not at all.

    names: of the copies of the images, no two alike without their suffix.
    polygons: write each object as a polygon; else as a box. Ultralytics takes all lines of a file
        for polygons where one is.
    """
    classes = sorted({o.desc for sample in samples for o in sample.objects})
    numbers = {desc: number for number, desc in enumerate(classes)}
    with writing(out), publish_directory(out) as part:
        for sample, name in zip(samples, names, strict=True):
            image = part / "images" / "train" / name
            labels = (part / "labels" / "train" / name).with_suffix(".txt")
            for file in (image, labels):
                file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(sample.images[0], image)
            lines = (
                " ".join([str(numbers[o.desc]), *map(_decimal, _fractions(o.shape, polygons))])
                for o in sample.objects
            )
            labels.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        # Ultralytics refuses a file without `val`.
        mapping = {"train": "images/train", "val": "images/train", "names": classes}
        text = yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True)
        (part / YAML).write_text(text, encoding="utf-8")


def _fractions(shape: Shape, polygons: bool) -> list[float]:
    if not polygons:
        x, y, width, height = pixel_xywh(shape, 1, 1)
        return [x + width / 2, y + height / 2, width, height]
    if shape.kind == "poly":
        return [decode_bin(k) for k in shape.coords]
    x1, y1, x2, y2 = (decode_bin(k) for k in bounding_box(shape))
    return [x1, y1, x2, y1, x2, y2, x1, y2]


def _decimal(value: float) -> str:
    return f"{value:.{_DECIMALS}f}".rstrip("0").rstrip(".")
