"""COCO instances -> data file: what cannot be taken over as it is falls under a counted `Rule`."""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from learner.data.coco import CocoAnnotation, CocoFile, CocoImage, Id
from learner.data.coco_objects import name_of, object_of
from learner.data.conversion import Conversion, Rule
from learner.data.images import Look, UnreadableImage, Watch, look_at_all
from learner.data.shapes import CoversAPixel, bounding_box
from learner.publish import publish_text
from learner.types import GeometryKind, GroundTruthObject
from shared_contracts.errors import ContractError

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
    """The records of a COCO file; images come in its order."""
    conversion = Conversion()
    names = {category.id: category.name for category in coco.categories}
    of_image = _by_image(coco, conversion)
    paths = [wanted.images.absolute() / image.file_name for image in coco.images]
    looks = watch(look_at_all(paths), len(paths))
    for image, (path, look) in zip(coco.images, looks, strict=True):
        annotations = of_image.get(image.id, [])
        if (fault := _fault(image, path, look)) is not None:
            conversion.note(fault, image.file_name)
            conversion.note(Rule.OF_IMAGE_LEFT_OUT, image.file_name, len(annotations))
            continue
        objects = _objects(image, annotations, names, wanted, conversion)
        if annotations and not objects:  # what it shows is not nothing
            conversion.note(Rule.ALL_LEFT_OUT, image.file_name)
            continue
        if not objects:
            empty = Rule.SKIPPED_IMAGE if wanted.skip_empty else Rule.EMPTY_IMAGE
            conversion.note(empty, image.file_name)
        if objects or not wanted.skip_empty:
            conversion.records.append(_record(image, path, _ordered(objects, wanted.order), wanted))
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


def _by_image(coco: CocoFile, conversion: Conversion) -> dict[Id, list[CocoAnnotation]]:
    listed = {image.id for image in coco.images}
    of_image: dict[Id, list[CocoAnnotation]] = defaultdict(list)
    for annotation in coco.annotations:
        if annotation.image_id in listed:
            of_image[annotation.image_id].append(annotation)
        else:
            conversion.note(Rule.UNKNOWN_IMAGE, name_of(annotation))
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
            rules = [Rule.DUPLICATE]
        elif item is not None:
            found[item] = None
        for rule in rules:
            conversion.note(rule, name_of(annotation))
    return list(found)


def _ordered(objects: list[GroundTruthObject], order: Order) -> list[GroundTruthObject]:
    if order == "file":
        return objects
    first, second = (0, 1) if order == "left-to-right" else (1, 0)
    boxes = {item: bounding_box(item.shape) for item in objects}
    return sorted(objects, key=lambda item: (boxes[item][first], boxes[item][second]))


def _record(
    image: CocoImage, path: Path, objects: Sequence[GroundTruthObject], wanted: Wanted
) -> dict[str, Any]:
    return {
        "images": [_relative(path, wanted.out)],
        "width": image.width,
        "height": image.height,
        "objects": [{"desc": o.desc, o.shape.kind: list(o.shape.coords)} for o in objects],
        "metadata": {"image_id": image.id},
    }


def _relative(image: Path, out: Path) -> str:
    """Path of an image from the folder of the data file.

    `..` leads out of the folder where a link points, so both are resolved; the image itself
    keeps its name.
    """
    return os.path.relpath(image.parent.resolve() / image.name, out.parent.resolve())
