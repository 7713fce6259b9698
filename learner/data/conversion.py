"""Annotations of another format as records of a data file.

convert            a `CocoFile` -> records; the `Account` says what was changed or left out
write_records      publishes those records
write_left_out     publishes the annotations that became no object

`coco`, `yolo`, `voc` and `conversations` read a `CocoFile`.
"""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from learner.data.account import Account, LeftOut, Rule
from learner.data.coco import (
    LVIS_LISTS,
    CocoAnnotation,
    CocoFile,
    CocoImage,
    Id,
    is_polygon,
    name_of,
)
from learner.data.images import Look, UnreadableImage, Watch, look_at_all, look_at_header
from learner.data.jsonl import CoversAPixel, bounding_box
from learner.runs.atomic_files import publish_text
from learner.stages.coords import encode_bin
from learner.types import GeometryKind, GroundTruthObject, Shape
from shared_contracts.errors import ContractError


@dataclass
class Conversion(Account):
    """records: lines of the data file."""

    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def objects(self) -> int:
        return sum(len(record["objects"]) for record in self.records)

    def leave_out(self, annotation: CocoAnnotation, image: str | None, rule: Rule) -> None:
        left = LeftOut(annotation.id, annotation.image_id, image, annotation.bbox, rule)
        self.left_out.append(left)


# Boxes that stick out of their image by fewer pixels were only rounded.
_ROUNDING = 0.01


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
    elif not isinstance(segmentation, list) or not all(map(is_polygon, segmentation)):
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
    conversion.add(coco.account)
    names = {category.id: category.name for category in coco.categories}
    of_image = _by_image(coco, conversion)
    paths = [wanted.images.absolute() / image.file_name for image in coco.images]
    looks = watch(look_at_all(paths, look_at_header), len(paths))
    for image, (path, look) in zip(coco.images, looks, strict=True):
        annotations = of_image.get(image.id, [])
        if (fault := _fault(image, path, look)) is not None:
            conversion.note(fault, image.file_name)
            for one in annotations:
                conversion.leave_out(one, image.file_name, fault)
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
        {"file": str(source), **left._asdict(), "reason": left.reason.what}
        for left in conversion.left_out
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
            conversion.leave_out(annotation, None, Rule.UNKNOWN_IMAGE)
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
            conversion.leave_out(annotation, image.file_name, rules[0])
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
