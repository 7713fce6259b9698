"""Data sets in the layout of Pascal VOC: an XML file for each image.

    Annotations/a.xml          size of the image, and name and `bndbox` of each object
    JPEGImages/a.jpg           the image
    ImageSets/Main/train.txt   names, without suffix, of a split

read_voc    such a data set -> `CocoFile`, or all that is wrong with it
write_voc   samples -> such a data set, with copies of their images

Pixels count from 1, and a box includes its last one: `xmin` 1 and `xmax` 640 are a whole image of
640 pixels (development kit of VOC2007). So x runs from `xmin - 1` to `xmax`.
"""

import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from learner.data.coco import CocoAnnotation, CocoCategory, CocoFile, CocoImage, pixel_xywh
from learner.data.images import UnreadableImage, look_at_header
from learner.data.jsonl import DataProblem, brief, capped, is_description
from learner.runs.atomic_files import publish_directory, writing
from learner.types import Sample, normalized
from shared_contracts.errors import ContractError

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif")
_EDGES = ("xmin", "ymin", "xmax", "ymax")
_BOX = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>640</xmax><ymax>480</ymax></bndbox>"
# What no XML can hold, or gives back changed.
_NOT_XML = re.compile(r"^\s|\s$|[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DECIMALS = 4


class _Read(NamedTuple):
    image: CocoImage
    annotations: list[CocoAnnotation]


def read_voc(path: Path, split: str | None, images: Path) -> CocoFile:
    """Read a data set; file names are relative to the folder `images`.

    path: the folder of `Annotations`, or one of XML files. split: a file of `ImageSets/Main`; else
    every XML file is read.

    Raises ContractErrors for all that is wrong with the files.
    """
    problems: list[ContractError] = []
    read: list[_Read] = []
    for file in _files(path, split, problems):
        reader = _Reader(file, images)
        one = reader.read()
        problems += reader.problems
        if one is not None:
            read.append(one)
    if problems:
        raise capped(str(path), problems)
    annotations = tuple(a for one in read for a in one.annotations)
    names = dict.fromkeys(str(a.category_id) for a in annotations)
    return CocoFile(
        images=tuple(one.image for one in read),
        annotations=annotations,
        categories=tuple(CocoCategory(id=name, name=name) for name in names),
    )


def images_of(path: Path) -> Path:
    """The folder of the images of a data set in the layout of VOC; else that of its XML files."""
    return path / "JPEGImages" if (path / "JPEGImages").is_dir() else path


def _files(path: Path, split: str | None, problems: list[ContractError]) -> list[Path]:
    folder = path / "Annotations" if (path / "Annotations").is_dir() else path
    files = sorted(folder.glob("*.xml"))
    if not files:
        raise ContractError(
            str(path), "there is no Annotations/*.xml", "Name the folder of a data set."
        )
    if split is None:
        return files
    listed = path / "ImageSets" / "Main" / f"{split}.txt"
    try:
        lines = listed.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(
            "--split", f"{listed} cannot be read ({error})", "Name a file of ImageSets/Main."
        ) from error
    chosen: dict[str, int] = {}
    there = {file.stem: file for file in files}
    for number, line in enumerate(lines, start=1):
        if not (words := line.split()):
            continue
        name = words[0]  # lists of one class have 1, 0 or -1 behind the name
        if name not in there:
            found = f"there is no {folder / name}.xml"
            problems.append(ContractError(f"{listed}:{number}", found, "Remove the line."))
        elif name in chosen:
            found = f"{name} is on line {chosen[name]}, too"
            problems.append(ContractError(f"{listed}:{number}", found, "Keep one of them."))
        chosen.setdefault(name, number)
    return [there[name] for name in chosen if name in there]


class _Reader:
    """Reads one XML file, noting every problem of it in `problems`."""

    def __init__(self, file: Path, images: Path) -> None:
        self.file = file
        self.images = images
        self.problems: list[ContractError] = []

    def _wrong(self, key: str, found: str, do: str) -> None:
        self.problems.append(ContractError(f"{self.file}: {key}", found, do))

    def read(self) -> _Read | None:
        try:
            root = ET.fromstring(self.file.read_bytes())  # expat bounds entities
        except (ET.ParseError, OSError, ValueError, LookupError) as error:
            self.problems.append(
                ContractError(str(self.file), f"it is no XML ({error})", "Mend or remove it.")
            )
            return None
        if root.tag != "annotation":
            self._wrong(root.tag, "the root is no <annotation>", "Remove the file.")
            return None
        name = self._image_name(root)
        size = self._size(root, name)
        annotations = [
            annotation
            for index, item in enumerate(root.findall("object"), start=1)
            if (annotation := self._object(item, index)) is not None
        ]
        if self.problems or size is None:
            return None
        width, height = size
        return _Read(
            CocoImage(id=self.file.stem, file_name=name, width=width, height=height), annotations
        )

    def _image_name(self, root: ET.Element) -> str:
        """Named by the file, else like it; where there is no such image, as it is named."""
        given = (root.findtext("filename") or "").strip()
        alike = [self.file.stem + s for suffix in _SUFFIXES for s in (suffix, suffix.upper())]
        names = [name for name in (given, *alike) if name]
        return next((n for n in names if os.path.isfile(self.images / n)), names[0])

    def _size(self, root: ET.Element, name: str) -> tuple[int, int] | None:
        """Of the annotated image; that of the image itself where the file has none, or 0."""
        sides = [self._number(root, f"size/{side}") for side in ("width", "height")]
        if sides == [None, None] or sides == [0.0, 0.0]:
            try:
                return look_at_header(self.images / name).size
            except UnreadableImage:
                return 1, 1  # it is left out
        width, height = (side or 0.0 for side in sides)
        if min(width, height) >= 1 and width.is_integer() and height.is_integer():
            return int(width), int(height)
        self._wrong("size", f"{width:g} x {height:g}", "Give width and height in pixels.")
        return None

    def _object(self, item: ET.Element, index: int) -> CocoAnnotation | None:
        key = f"object[{index}]"
        name = (item.findtext("name") or "").strip()
        if not is_description(name):
            self._wrong(
                f"{key}.name",
                f"{brief(name)} cannot be the description of an object",
                "Give a name in Unicode text, not blank, without special tokens like <|im_end|>.",
            )
        before = len(self.problems)
        edges = [self._number(item, f"bndbox/{edge}", key) for edge in _EDGES]
        missing = [edge for edge, value in zip(_EDGES, edges, strict=True) if value is None]
        if missing and len(self.problems) == before:
            self._wrong(f"{key}.bndbox", f"{', '.join(missing)} missing", f"Write {_BOX}.")
        if self.problems:
            return None
        x1, y1, x2, y2 = (value or 0.0 for value in edges)
        return CocoAnnotation(
            id=f"{self.file.name}: {key}",
            image_id=self.file.stem,
            category_id=normalized(name),
            bbox=(x1 - 1, y1 - 1, x2 - (x1 - 1), y2 - (y1 - 1)),
        )

    def _number(self, item: ET.Element, path: str, key: str = "") -> float | None:
        """None where there is none, or where it is a problem."""
        if (text := item.findtext(path)) is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
        where = ".".join(filter(None, [key, *path.split("/")]))
        self._wrong(where, f"{brief(text)} is no number", "Write a number of pixels.")
        return None


def voc_faults(samples: Iterable[Sample]) -> Iterator[DataProblem]:
    """Descriptions that XML cannot hold."""
    for sample in samples:
        for index, item in enumerate(sample.objects):
            if _NOT_XML.search(item.desc):
                yield DataProblem(
                    "description",
                    sample.sample_id,
                    f"objects[{index}].desc {brief(item.desc)} cannot be written as XML",
                    "Remove control characters, and space at its ends.",
                )


def write_voc(samples: Sequence[Sample], names: Sequence[PurePosixPath], out: Path) -> None:
    """Make the folder `out`, whole or not at all; polygons become the boxes around them.

    names: of the copies of the images, in one folder, no two alike without their suffix.
    """
    with writing(out), publish_directory(out) as part:
        annotations, images, sets = (
            part / name for name in ("Annotations", "JPEGImages", "ImageSets/Main")
        )
        for folder in (annotations, images, sets):
            folder.mkdir(parents=True)
        for sample, name in zip(samples, names, strict=True):
            shutil.copyfile(sample.images[0], images / name)
            text = "".join(_xml(sample, name))
            (annotations / name).with_suffix(".xml").write_text(text, encoding="utf-8")
        listed = "".join(f"{name.stem}\n" for name in names)
        (sets / "train.txt").write_text(listed, encoding="utf-8")


def _xml(sample: Sample, name: PurePosixPath) -> Iterator[str]:
    yield "<annotation>\n  <folder>JPEGImages</folder>\n"
    yield f"  <filename>{escape(str(name))}</filename>\n"
    yield f"  <size><width>{sample.width}</width><height>{sample.height}</height>"
    yield "<depth>3</depth></size>\n  <segmented>0</segmented>\n"
    for item in sample.objects:
        x, y, width, height = pixel_xywh(item.shape, sample.width, sample.height)
        edges = zip(_EDGES, (x + 1, y + 1, x + width, y + height), strict=True)
        box = "".join(f"<{edge}>{_decimal(value)}</{edge}>" for edge, value in edges)
        yield f"  <object>\n    <name>{escape(item.desc)}</name>\n    <pose>Unspecified</pose>\n"
        yield "    <truncated>0</truncated>\n    <difficult>0</difficult>\n"
        yield f"    <bndbox>{box}</bndbox>\n  </object>\n"
    yield "</annotation>\n"


def _decimal(value: float) -> str:
    return f"{value:.{_DECIMALS}f}".rstrip("0").rstrip(".")
