"""Annotations of another format as records of a data file.

convert            what a `CocoFile` holds -> records; what cannot be taken over as it is falls
                   under a counted `Rule`
write_records      publishes those records
write_left_out     publishes the annotations that became no object

`learner.data.coco`, `learner.data.yolo` and `learner.data.voc` read a `CocoFile`.
"""

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from learner.data.coco import LVIS_LISTS, CocoAnnotation, CocoFile, CocoImage, Id
from learner.data.images import Look, UnreadableImage, Watch, look_at_all, look_at_header
from learner.data.jsonl import CoversAPixel, bounding_box
from learner.runs.atomic_files import publish_text
from learner.stages.coords import encode_bin
from learner.types import GeometryKind, GroundTruthObject, Shape
from shared_contracts.errors import ContractError


class Rule(Enum):
    """Which images or annotations, and what becomes of them.

    An annotation falls under one of the rules that leave it out, or becomes an object.
    """

    MISSING_IMAGE = "images without a file", "left out"
    UNREADABLE_IMAGE = "images that cannot be decoded", "left out"
    OTHER_SIZE = "images of another size than annotated", "left out"
    REORIENTED = "images that EXIF turns or mirrors", "taken as upright"
    SKIPPED_IMAGE = "images that show no object", "left out"
    EMPTY_IMAGE = "images that show no object", "kept"
    ALL_LEFT_OUT = "images whose annotations were all left out", "left out"
    UNKNOWN_IMAGE = "annotations of an image that is not listed", "left out"
    OF_IMAGE_LEFT_OUT = "annotations of an image left out", "left out"
    CROWD = "annotations of a crowd", "left out"
    UNKNOWN_CATEGORY = "annotations of a category that is not listed", "left out"
    NO_AREA = "annotations of no area", "left out"
    OUTSIDE = "annotations outside of the image", "left out"
    THIN = "annotations too thin to match", "left out"
    DUPLICATE = "annotations like another in every bin", "left out"
    CLIPPED = "annotations partly outside of the image", "clipped"
    NO_SEGMENTATION = "annotations without a polygon", "box taken"
    RUN_LENGTH = "annotations with a run-length mask", "box taken"
    SEVERAL_POLYGONS = "annotations of several polygons", "box taken"
    BAD_POLYGON = "annotations whose polygon is no list of points", "box taken"
    THIN_POLYGON = "annotations whose polygon is too thin to match", "box taken"

    @property
    def what(self) -> str:
        return self.value[0]

    @property
    def done(self) -> str:
        return self.value[1]


class LeftOut(NamedTuple):
    """An annotation that became no object, and why. image: its file name, where it is listed."""

    annotation: CocoAnnotation
    image: str | None
    rule: Rule


@dataclass
class Conversion:
    """records: lines of the data file. first: what each rule was first applied to."""

    records: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[Rule] = field(default_factory=Counter)
    first: dict[Rule, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def objects(self) -> int:
        return sum(len(record["objects"]) for record in self.records)

    def note(self, rule: Rule, about: str, times: int = 1) -> None:
        if times:
            self.counts[rule] += times
            self.first.setdefault(rule, about)


# Boxes that stick out of their image by fewer pixels were only rounded.
_ROUNDING = 0.01
# Of a float; whole numbers in JSON may be larger.
_LARGEST = sys.float_info.max


def name_of(annotation: CocoAnnotation) -> str:
    """As a table names it."""
    if annotation.id is None:
        return f"annotation of image {annotation.image_id}"
    return f"annotation {annotation.id}"


def object_of(
    annotation: CocoAnnotation,
    image: CocoImage,
    names: dict[Id, str],
    geometry: GeometryKind,
    covers_a_pixel: CoversAPixel,
) -> tuple[GroundTruthObject | None, list[Rule]]:
    """The object of an annotation and how it was changed, or None and why there is none.

    names: of the categories, by id.
    geometry: `poly` takes an annotation's polygon where it has exactly one, else its box.
    """
    rules: list[Rule] = []
    found: GroundTruthObject | None = None
    if annotation.iscrowd:
        rules.append(Rule.CROWD)
    elif annotation.category_id not in names:
        rules.append(Rule.UNKNOWN_CATEGORY)
    else:
        shape = (
            _polygon(annotation.segmentation, image, covers_a_pixel, rules)
            if geometry == "poly"
            else None
        )
        shape = shape or _box(annotation.bbox, image, covers_a_pixel, rules)
        if shape is not None:
            found = GroundTruthObject(names[annotation.category_id], shape)
    if found is None:
        rules = rules[-1:]
    return found, rules


def _box(
    bbox: tuple[float, float, float, float],
    image: CocoImage,
    covers_a_pixel: CoversAPixel,
    rules: list[Rule],
) -> Shape | None:
    x, y, width, height = bbox
    if width <= 0 or height <= 0:
        rules.append(Rule.NO_AREA)
        return None
    if x >= image.width or y >= image.height or x + width <= 0 or y + height <= 0:
        rules.append(Rule.OUTSIDE)
        return None
    points = [(x, y), (x + width, y + height)]
    shape = Shape("bbox_2d", tuple(k for point in points for k in _bins(point, image)))
    if not covers_a_pixel(shape):
        rules.append(Rule.THIN)
        return None
    _note_clipping(points, image, rules)
    return shape


def _polygon(
    segmentation: Any, image: CocoImage, covers_a_pixel: CoversAPixel, rules: list[Rule]
) -> Shape | None:
    if not segmentation:
        rules.append(Rule.NO_SEGMENTATION)
    elif isinstance(segmentation, dict):
        rules.append(Rule.RUN_LENGTH)
    elif not isinstance(segmentation, list) or not all(map(_is_polygon, segmentation)):
        rules.append(Rule.BAD_POLYGON)
    elif len(segmentation) > 1:
        rules.append(Rule.SEVERAL_POLYGONS)
    else:
        (flat,) = segmentation
        points = list(zip(flat[0::2], flat[1::2], strict=True))
        return _one_polygon(points, image, covers_a_pixel, rules)
    return None


def _one_polygon(
    points: list[tuple[float, float]],
    image: CocoImage,
    covers_a_pixel: CoversAPixel,
    rules: list[Rule],
) -> Shape | None:
    """Points outside of the image move to its nearest edge; repeated ones are one."""
    bins = [_bins(point, image) for point in points]
    corners = [point for i, point in enumerate(bins) if point != bins[i - 1]]
    shape = Shape("poly", tuple(k for point in corners for k in point))
    if len(corners) < 3 or not covers_a_pixel(shape):
        rules.append(Rule.THIN_POLYGON)
        return None
    _note_clipping(points, image, rules)
    return shape


def _is_polygon(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) >= 6
        and len(value) % 2 == 0
        and all(type(v) in (int, float) and abs(v) <= _LARGEST for v in value)
    )


def _bins(point: tuple[float, float], image: CocoImage) -> tuple[int, int]:
    x, y = _inside(point, image)
    return encode_bin(x / image.width), encode_bin(y / image.height)


def _inside(point: tuple[float, float], image: CocoImage) -> tuple[float, float]:
    return min(max(point[0], 0), image.width), min(max(point[1], 0), image.height)


def _note_clipping(points: list[tuple[float, float]], image: CocoImage, rules: list[Rule]) -> None:
    moved = (abs(a - b) for p in points for a, b in zip(p, _inside(p, image), strict=True))
    if max(moved) > _ROUNDING:
        rules.append(Rule.CLIPPED)


Order = Literal["file", "left-to-right", "top-to-bottom"]


@dataclass(frozen=True)
class Wanted:
    """How to convert.

    images: folder that the file names start at.
    out: the data file, at whose folder its image paths start.
    skip_empty: leave out images without an annotation.
    covers_a_pixel: objects that cover none are left out.
    """

    images: Path
    out: Path
    geometry: GeometryKind
    order: Order
    skip_empty: bool
    covers_a_pixel: CoversAPixel


def convert(coco: CocoFile, wanted: Wanted, watch: Watch) -> Conversion:
    """The records of a COCO file; images come in its order. Only their headers are read."""
    conversion = Conversion()
    names = {category.id: category.name for category in coco.categories}
    of_image = _by_image(coco, conversion)
    paths = [wanted.images.absolute() / image.file_name for image in coco.images]
    looks = watch(look_at_all(paths, look_at_header), len(paths))
    for image, (path, look) in zip(coco.images, looks, strict=True):
        annotations = of_image.get(image.id, [])
        if (fault := _fault(image, path, look)) is not None:
            conversion.note(fault, image.file_name)
            conversion.left_out += [LeftOut(one, image.file_name, fault) for one in annotations]
            conversion.note(Rule.OF_IMAGE_LEFT_OUT, image.file_name, len(annotations))
            continue
        if isinstance(look, Look) and look.reoriented:
            conversion.note(Rule.REORIENTED, image.file_name)
        objects = _objects(image, annotations, names, wanted, conversion)
        if annotations and not objects:  # what it shows is not nothing
            conversion.note(Rule.ALL_LEFT_OUT, image.file_name)
            continue
        if not objects:
            empty = Rule.SKIPPED_IMAGE if wanted.skip_empty else Rule.EMPTY_IMAGE
            conversion.note(empty, image.file_name)
        if wanted.order != "file":
            axes = (0, 1) if wanted.order == "left-to-right" else (1, 0)
            boxes = {item: bounding_box(item.shape) for item in objects}
            objects.sort(key=lambda item: tuple(boxes[item][axis] for axis in axes))
        if objects or not wanted.skip_empty:
            conversion.records.append(_record(image, path, objects, names, wanted))
    return conversion


def write_records(conversion: Conversion, annotations: int, out: Path) -> None:
    """Publish a data file, whole or not at all.

    annotations: how many there were. Raises ContractError when no image is left, or no object
        came of them.
    """
    records = conversion.records
    if not records:
        raise ContractError(
            str(out), "no image is left to write", "See in the table why each was left out."
        )
    if annotations and not conversion.objects:
        raise ContractError(
            str(out),
            f"no object came of {annotations} annotations",
            "See in the table why each was left out; ids of images and categories must be equal, "
            'and "1" is not 1.',
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_text(out, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def write_left_out(conversion: Conversion, source: Path, out: Path) -> None:
    """Publish a JSON line for each annotation of the file `source` that became no object."""
    lines = (
        {
            "file": str(source),
            "annotation_id": annotation.id,
            "image_id": annotation.image_id,
            "image": image,
            "bbox": annotation.bbox,
            "reason": rule.what,
        }
        for annotation, image, rule in conversion.left_out
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_text(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _by_image(coco: CocoFile, conversion: Conversion) -> dict[Id, list[CocoAnnotation]]:
    listed = {image.id for image in coco.images}
    of_image: dict[Id, list[CocoAnnotation]] = defaultdict(list)
    for annotation in coco.annotations:
        if annotation.image_id in listed:
            of_image[annotation.image_id].append(annotation)
        else:
            conversion.note(Rule.UNKNOWN_IMAGE, name_of(annotation))
            conversion.left_out.append(LeftOut(annotation, None, Rule.UNKNOWN_IMAGE))
    return of_image


def _fault(image: CocoImage, path: Path, look: Look | UnreadableImage) -> Rule | None:
    """Why an image is left out, None where it is not."""
    if not os.path.isfile(path):
        return Rule.MISSING_IMAGE
    if isinstance(look, UnreadableImage):
        return Rule.UNREADABLE_IMAGE
    return None if look.size == (image.width, image.height) else Rule.OTHER_SIZE


def _objects(
    image: CocoImage,
    annotations: Sequence[CocoAnnotation],
    names: dict[Id, str],
    wanted: Wanted,
    conversion: Conversion,
) -> list[GroundTruthObject]:
    found: dict[GroundTruthObject, None] = {}
    for annotation in annotations:
        item, rules = object_of(annotation, image, names, wanted.geometry, wanted.covers_a_pixel)
        if item in found:
            item, rules = None, [Rule.DUPLICATE]
        if item is None:
            conversion.left_out.append(LeftOut(annotation, image.file_name, rules[0]))
        else:
            found[item] = None
        for rule in rules:
            conversion.note(rule, name_of(annotation))
    return list(found)


def _record(
    image: CocoImage,
    path: Path,
    objects: Sequence[GroundTruthObject],
    names: dict[Id, str],
    wanted: Wanted,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"image_id": image.id}
    for key, ids in LVIS_LISTS.items():
        if (listed := getattr(image, ids)) is not None:
            metadata[key] = [names[one] for one in listed]
    # `..` leads out of the folder where a link points, so both are resolved; the image itself
    # keeps its name.
    folder, out = path.parent.resolve(), wanted.out.parent.resolve()
    return {
        "images": [os.path.relpath(folder / path.name, out)],
        "width": image.width,
        "height": image.height,
        "objects": [{"desc": o.desc, o.shape.kind: list(o.shape.coords)} for o in objects],
        "metadata": metadata,
    }
