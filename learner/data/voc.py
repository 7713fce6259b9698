"""Data sets in the layout of Pascal VOC: an XML file for each image.

    Annotations/a.xml          size of the image, and name and `bndbox` of each object
    JPEGImages/a.jpg           the image
    ImageSets/Main/train.txt   names, without suffix, of a split

Pixels count from 1, and `xmax` is inclusive: `xmin` 1 and `xmax` 640 span an image of 640 pixels
(development kit of VOC2007). So x runs from `xmin - 1` to `xmax`.
"""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from learner.data.coco import pixel_xywh
from learner.data.files import read_text
from learner.data.jsonl import Size
from learner.data.records import Account, Annotation, Rule, Source, SourceImage
from learner.types import Sample
from shared_contracts.errors import ContractError

IMAGES = "JPEGImages"
_EDGES = ("xmin", "ymin", "xmax", "ymax")
# Text that XML cannot contain, or does not keep.
NOT_XML = re.compile(r"^\s|\s$|[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def read_voc(path: Path, split: str | None, images: Path | None) -> Source:
    """Read a data set. images: base of file names, if stated.

    path: the folder that contains `Annotations`, or a folder of XML files. split: name of a list
    in `ImageSets/Main`; None: all XML files.
    """
    default = path / IMAGES
    folder = images or (default if default.is_dir() else path)
    alike = {p.stem: p.name for p in folder.glob("*") if p.suffix not in (".xml", ".txt")}
    account, pictures = Account(), []
    for file in _files(path, split):
        try:
            root = ET.fromstring(file.read_bytes())  # expat bounds entities
        except (ET.ParseError, OSError, ValueError, LookupError) as error:
            account.note(Rule.NO_BOXES, f"{file.name}: {error}")
            continue
        annotations = [
            Annotation.read(
                f"{file.name}: object[{index}]",
                file.stem,
                item.findtext("name", "").strip(),
                [_number(item, f"bndbox/{edge}") - edge.endswith("min") for edge in _EDGES],
                scale="pixels",
                corners="xyxy",
            )
            for index, item in enumerate(root.findall("object"), start=1)
        ]
        # The image of `filename`, else that with the stem of the XML file.
        name = root.findtext("filename", "").strip().replace("\\", "/")
        if not os.path.isfile(folder / name):
            name = alike.get(file.stem, name or file.stem)
        pictures.append(SourceImage(file.stem, name, _size(root), annotations))
    return Source(folder, pictures, account)


def _files(path: Path, split: str | None) -> list[Path]:
    folder = path / "Annotations" if (path / "Annotations").is_dir() else path
    if split is not None:
        listed = path / "ImageSets" / "Main" / f"{split}.txt"
        lines = read_text(listed, "Name a file of ImageSets/Main with --split.").splitlines()
        # Lists of one class have a second column: 1, 0 or -1. Names may have spaces.
        names = ((line, line.rsplit(None, 1)[0]) for line in map(str.strip, lines) if line)
        paths = ([folder / f"{name}.xml" for name in both] for both in names)
        return [*dict.fromkeys(whole if whole.is_file() else first for whole, first in paths)]
    if not (files := sorted(folder.glob("*.xml"))):
        raise ContractError(str(path), "has no Annotations/*.xml", "Name the folder of a data set.")
    return files


def _size(root: ET.Element) -> Size | None:
    """Return the annotated image size; None if it is missing or 0."""
    width, height = (_number(root, f"size/{side}") for side in ("width", "height"))
    return (int(width), int(height)) if width >= 1 and height >= 1 else None


def _number(item: ET.Element, path: str) -> float:
    try:
        number = float(item.findtext(path, "nan"))
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def voc_texts(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, str]:
    """Return the text files of a data set by their paths; polygons become their bounding boxes.

    names: file names of the images in `IMAGES`, with distinct stems.
    """
    texts = {"ImageSets/Main/train.txt": "".join(f"{Path(name).stem}\n" for name in names)}
    for sample, name in zip(samples, names, strict=True):
        texts[f"Annotations/{Path(name).stem}.xml"] = _xml(sample, name)
    return texts


def _xml(sample: Sample, name: str) -> str:
    root = ET.Element("annotation")
    ET.SubElement(root, "filename").text = name
    size = ET.SubElement(root, "size")
    for key, side in (("width", sample.width), ("height", sample.height), ("depth", 3)):
        ET.SubElement(size, key).text = str(side)
    for item in sample.objects:
        x, y, width, height = pixel_xywh(item.shape, sample.width, sample.height)
        node = ET.SubElement(root, "object")
        ET.SubElement(node, "name").text = item.desc
        for key in ("truncated", "difficult"):
            ET.SubElement(node, key).text = "0"
        box = ET.SubElement(node, "bndbox")
        for edge, value in zip(_EDGES, (x + 1, y + 1, x + width, y + height), strict=True):
            ET.SubElement(box, edge).text = f"{value:.4f}".rstrip("0").rstrip(".")
    ET.indent(root)
    return ET.tostring(root, encoding="unicode")
