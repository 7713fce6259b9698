"""Conversion of other formats to a data file, and of a data file to other formats."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from learner.config.rollout_matching import MatchingConfig
from learner.data import voc, yolo
from learner.data.coco import json_text, read_coco, to_coco, to_lvis
from learner.data.conversations import read_conversations, swift_text
from learner.data.files import DataProblem, Format, OutFormat, write_lines
from learner.data.images import (
    ImageInfo,
    ImageResult,
    UnreadableImage,
    image_problems,
    inspect_all,
)
from learner.data.jsonl import DataFile, Size, bounding_box
from learner.data.records import (
    Account,
    Annotation,
    Corners,
    Order,
    Reading,
    Rule,
    Scale,
    Source,
    SourceImage,
    find_reading,
)
from learner.runs.atomic_files import publish_directory, publish_text, writing
from learner.stages.matching import covers_a_pixel
from learner.stages.tokens import encode_bin
from learner.types import GeometryKind, GroundTruthObject, Sample, Shape
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import shown

# Largest overhang of a box over its image, in pixels, that counts as rounding.
_ROUNDING = 0.01
_CANVAS = MatchingConfig().maskiou_resolution
Stated = tuple[Scale | None, Corners | None]
Readings = dict[Stated, Reading]


def read_other(
    source: Path, form: Format, images: Path | None = None, split: str | None = None
) -> Source:
    """Read a file or folder; one reader handles all formats of conversations.

    images: base of image names, if stated. split: of yolo and voc.
    """
    if form == "yolo":
        return yolo.read_yolo(source, split)
    if form == "voc":
        return voc.read_voc(source, split, images)
    if form in ("coco", "lvis"):
        return read_coco(source, images)
    return read_conversations(source, images or source.parent)


class Conversion(NamedTuple):
    """records: lines of the data file. account: of changes and omissions."""

    records: list[dict[str, Any]]
    account: Account

    @property
    def objects(self) -> int:
        return sum(len(record["objects"]) for record in self.records)


def convert(
    source: Source,
    out: Path,
    geometry: GeometryKind = "bbox_2d",
    order: Order = "file",
    skip_empty: bool = False,
    scale: Scale | None = None,
    corners: Corners | None = None,
) -> Conversion:
    """Convert a source, in its order of images; only image headers are read.

    out: path of the data file; its image paths are relative to the folder of `out`.
    geometry: `poly` uses the polygon of an annotation with exactly one polygon, else its box.
    skip_empty: leave out images without annotations.
    scale, corners: of boxes that do not state both. None: as a box states it, else found from all
        boxes.

    Raises ContractError as `find_reading` does.
    """
    account, pictures = source.account, _put_together(source)
    paths = [source.folder.absolute() / picture.name for picture in pictures]
    found = inspect_all(paths)
    results = [found[path] for path in paths]
    readings = _readings(source, pictures, results, scale, corners)
    annotations = len(account.left_out) + sum(len(picture.annotations) for picture in pictures)
    conversion, folder = Conversion([], account), out.parent.resolve()
    for picture, path, result in zip(pictures, paths, results, strict=True):
        fault = _fault(picture, path, result)
        if fault is not None:
            account.note(fault, picture.name)
            for one in picture.annotations:
                account.leave_out(one, picture.name, fault)
            continue
        assert isinstance(result, ImageInfo), "else it has a fault"
        account.note(Rule.REORIENTED, picture.name, result.reoriented)
        objects = _objects(picture, result.size, readings, geometry, account)
        if picture.annotations and not objects:  # the image shows objects: it is not empty
            account.note(Rule.ALL_LEFT_OUT, picture.name)
            continue
        if not objects:
            account.note(Rule.SKIPPED_IMAGE if skip_empty else Rule.EMPTY_IMAGE, picture.name)
        if order != "file":
            axes = (0, 1) if order == "left-to-right" else (1, 0)
            objects.sort(key=lambda item: [bounding_box(item.shape)[axis] for axis in axes])
        if objects or not skip_empty:
            record = {
                # `..` of a linked folder is the target's parent, so both folders are resolved; an
                # image that is a link itself keeps its name.
                "images": [os.path.relpath(path.parent.resolve() / path.name, folder)],
                "width": result.size[0],
                "height": result.size[1],
                "objects": [{"desc": o.desc, o.shape.kind: list(o.shape.coords)} for o in objects],
                "metadata": {"image_id": picture.id, **picture.metadata},
            }
            conversion.records.append(record)
    account.totals = [
        (len(pictures), "images", f"{len(conversion.records)} lines"),
        (annotations, "annotations", f"{conversion.objects} objects"),
    ]
    return conversion


def _put_together(source: Source) -> list[SourceImage]:
    """Merge the records of one image file, unless their annotated sizes differ."""
    merged = dict[Any, SourceImage]()
    for picture in source.pictures:
        path = os.path.normpath(source.folder.absolute() / picture.name)
        one = merged.setdefault(path, picture)
        one.size = one.size or picture.size
        if picture.size not in (None, one.size):  # at most one size is that of the file
            one = merged.setdefault((path, picture.size), picture)
        if one is not picture:
            source.account.note(Rule.REPEATED_IMAGE, picture.name)
            one.annotations += picture.annotations
            for key, names in picture.metadata.items():
                one.metadata[key] = list(dict.fromkeys([*one.metadata.get(key, []), *names]))
    return list(merged.values())


def _readings(
    source: Source,
    pictures: Sequence[SourceImage],
    results: Sequence[ImageResult],
    scale: Scale | None,
    corners: Corners | None,
) -> Readings:
    """Return the reading of boxes by what they state; the account gets its evidence."""
    boxes: dict[Stated, list[tuple[Any, Size | None]]] = {}
    for picture, result in zip(pictures, results, strict=True):
        size = result.size if isinstance(result, ImageInfo) else picture.size
        for one in picture.annotations:
            if one.fault is None:
                boxes.setdefault((one.scale, one.corners), []).append((one.box, size))
    readings: Readings = {}
    for stated, known in boxes.items():
        given = stated if all(stated) else (scale or stated[0], corners or stated[1])
        readings[stated] = find_reading(known, *given, source.usual)
    evidence = (
        f"{len(boxes[stated])} boxes: {reading.evidence}"
        for stated, reading in readings.items()
        if reading.evidence
    )
    source.account.evidence = "; ".join(evidence)
    return readings


def _fault(picture: SourceImage, path: Path, result: ImageResult) -> Rule | None:
    if not os.path.isfile(path):
        return Rule.MISSING_IMAGE
    if isinstance(result, UnreadableImage):
        return Rule.UNREADABLE_IMAGE
    return None if picture.size in (None, result.size) else Rule.OTHER_SIZE


def _objects(
    picture: SourceImage, size: Size, readings: Readings, geometry: GeometryKind, account: Account
) -> list[GroundTruthObject]:
    objects: dict[GroundTruthObject, None] = {}
    for one in picture.annotations:
        if one.fault is not None:
            item, rules = None, [one.fault]
        else:
            shape, rules = _shape_of(one, size, readings[one.scale, one.corners], geometry)
            item = None if shape is None else GroundTruthObject(one.desc, shape)
        if item in objects:
            item, rules = None, [Rule.DUPLICATE]
        if item is None:
            account.leave_out(one, picture.name, rules[0])
            continue
        objects[item] = None
        for rule in rules:
            account.note(rule, one)
    return list(objects)


def _shape_of(
    one: Annotation, size: Size, reading: Reading, geometry: GeometryKind
) -> tuple[Shape | None, list[Rule]]:
    """Return the shape and its changes, or None and the rule that leaves it out."""
    rules = []
    if geometry == "poly":
        x, y = reading.unit(size)
        flat = one.polygon or ()
        points = [(a * x, b * y) for a, b in zip(flat[0::2], flat[1::2], strict=True)]
        shape, changes = _shape("poly", points, size)
        if shape is not None:
            return shape, changes
        rules = [Rule.NO_POLYGON]
    x1, y1, x2, y2 = reading.pixels(one.box, size)
    if x2 <= x1 or y2 <= y1:
        return None, [Rule.NO_AREA]
    if x1 >= size[0] or y1 >= size[1] or x2 <= 0 or y2 <= 0:
        return None, [Rule.OUTSIDE]
    shape, changes = _shape("bbox_2d", [(x1, y1), (x2, y2)], size)
    return shape, [Rule.THIN] if shape is None else [*rules, *changes]


def _shape(
    kind: GeometryKind, points: Sequence[tuple[float, float]], size: Size
) -> tuple[Shape | None, list[Rule]]:
    """Return the shape with points clipped to the image and repeated polygon points merged.

    The shape is None if it covers no pixel of the matching canvas.
    """
    inside = [(min(max(x, 0), size[0]), min(max(y, 0), size[1])) for x, y in points]
    moved = (max(abs(a - x), abs(b - y)) for (a, b), (x, y) in zip(points, inside, strict=True))
    bins = [(encode_bin(x / size[0]), encode_bin(y / size[1])) for x, y in inside]
    if kind == "poly":
        bins = [point for i, point in enumerate(bins) if point != bins[i - 1]]
    shape = Shape(kind, tuple(k for point in bins for k in point))
    if len(bins) < (3 if kind == "poly" else 2) or not covers_a_pixel(shape, _CANVAS):
        return None, []
    return shape, [Rule.CLIPPED] if max(moved) > _ROUNDING else []


def write_records(conversion: Conversion, out: Path) -> None:
    """Publish a data file atomically.

    Raises ContractError if no image is left, or if no annotation became an object.
    """
    if not conversion.records:
        do = "See in the table why each was left out; --images states where image names start."
        raise ContractError(str(out), "no image is left to write", do)
    if conversion.account.left_out and not conversion.objects:
        found = f"no object came of {len(conversion.account.left_out)} annotations"
        do = "See in the table why each was left out; ids of images and categories must be equal, "
        do += 'and "1" is not 1.'
        raise ContractError(str(out), found, do)
    write_lines(out, conversion.records)


def write_other(
    source: Path, out: Path, form: OutFormat, images: Path, geometry: GeometryKind
) -> Account:
    """Write a data file, with one image a sample, in another format; return the account.

    images: base of image names; yolo and voc get copies of the images.

    Raises ContractErrors: all problems of the data file, each at `file:line`.
    """
    file, account, polygons = DataFile(source, allow_poly=True), Account(), geometry == "poly"
    results = inspect_all(path for sample in file.samples for path in sample.images)
    names = _names_of_images(file.samples)
    for sample in file.samples:
        file.findings += image_problems(sample, results)
        if len(sample.images) > 1:
            found = f"the sample has {len(sample.images)} images"
            do = "Give it one; the other formats hold objects of one image."
            file.findings.append(DataProblem("several images", sample.sample_id, found, do))
        result = results[sample.images[0]]
        if isinstance(result, ImageInfo):
            account.note(Rule.REORIENTED, sample.sample_id, result.reoriented)
        others = sum(item.shape.kind != geometry for item in sample.objects)
        if form in ("yolo", "voc", "ms-swift"):
            account.note(Rule.BOXES if polygons else Rule.POLYGONS, sample.sample_id, others)
    if form in ("yolo", "voc"):
        file.findings += _name_faults(file.samples, names, xml=form == "voc")
    samples = file.valid_samples()
    if form == "yolo":
        _publish_folder(out, samples, names, yolo.IMAGES, yolo.yolo_texts(samples, names, polygons))
    elif form == "voc":
        _publish_folder(out, samples, names, voc.IMAGES, voc.voc_texts(samples, names))
    else:
        if form == "ms-swift":
            text = swift_text(samples, images)
        else:
            text = json_text((to_lvis if form == "lvis" else to_coco)(samples, images))
        out.parent.mkdir(parents=True, exist_ok=True)
        publish_text(out, text)
    account.totals = [(len(samples), "images", ""), (file.objects, "objects", "")]
    return account


def _publish_folder(
    out: Path,
    samples: Sequence[Sample],
    names: Sequence[str],
    images: str,
    texts: Mapping[str, str],
) -> None:
    """Publish a folder atomically: text files by their paths, and copies of the images."""
    with writing(out), publish_directory(out) as part:
        for path, text in texts.items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).write_text(text, encoding="utf-8")
        (part / images).mkdir(parents=True)
        for sample, name in zip(samples, names, strict=True):
            shutil.copyfile(sample.images[0], part / images / name)


def _names_of_images(samples: Sequence[Sample]) -> list[str]:
    """Return names for one flat folder: the path below the common folder, as `day_a.jpg`."""
    paths = [Path(os.path.normpath(sample.images[0])) for sample in samples]
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return ["_".join(path.relative_to(root).parts) for path in paths]


def _name_faults(
    samples: Sequence[Sample], names: Sequence[str], xml: bool
) -> Iterator[DataProblem]:
    """Yield samples with equal label file names, and descriptions that XML cannot contain."""
    first: dict[str, Sample] = {}
    for sample, name in zip(samples, names, strict=True):
        earlier = first.setdefault(Path(name).stem, sample)
        if earlier is not sample:
            found = f"image {sample.images[0]} has the name of that of {earlier.sample_id}"
            do = "Give images names of their own, also without suffix, and one line each."
            yield DataProblem("same name", sample.sample_id, found, do)
        for index, item in enumerate(sample.objects if xml else ()):
            if voc.NOT_XML.search(item.desc):
                found = f"objects[{index}].desc {shown(item.desc)} cannot be written as XML"
                do = "Remove control characters, and space at its ends."
                yield DataProblem("description", sample.sample_id, found, do)
