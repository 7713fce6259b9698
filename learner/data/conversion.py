"""A `Source` as lines of a data file.

convert            the lines, and the account of what was changed or left out
write_records      publishes them
write_left_out     publishes the annotations that became no object
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learner.config.rollout_matching import MatchingConfig
from learner.data.boxes import Reading, find_reading
from learner.data.images import Look, Seen, UnreadableImage, Watch, look_at_all, look_at_header
from learner.data.jsonl import bounding_box, write_lines
from learner.data.records import Account, Annotation, Order, Picture, Rule, Scale, Size, Source
from learner.stages.coords import encode_bin
from learner.stages.matching import covers_a_pixel
from learner.types import GeometryKind, GroundTruthObject, Shape
from shared_contracts.errors import ContractError

# Boxes that stick out of their image by fewer pixels were only rounded.
_ROUNDING = 0.01
_CANVAS = MatchingConfig().maskiou_resolution
Readings = dict[Scale | None, Reading]


@dataclass
class Conversion:
    """records: lines of the data file. images, annotations: how many the source has.

    evidence: how numbers of boxes were read, where the source does not state it.
    """

    account: Account
    images: int
    annotations: int
    evidence: str
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def objects(self) -> int:
        return sum(len(record["objects"]) for record in self.records)


def convert(
    source: Source,
    out: Path,
    watch: Watch,
    geometry: GeometryKind = "bbox_2d",
    order: Order = "file",
    skip_empty: bool = False,
) -> Conversion:
    """Convert; images come in the order of the source. Only their headers are read.

    out: the data file, at whose folder its image paths start.
    geometry: `poly` takes an annotation's polygon where it has exactly one, else its box.
    skip_empty: leave out images without an annotation.

    Raises ContractError, about the scale, where that is neither stated nor found.
    """
    account, pictures = source.account, source.pictures
    paths = [source.folder.absolute() / picture.name for picture in pictures]
    seen = [look for _, look in watch(look_at_all(paths, look_at_header), len(paths))]
    readings, evidence = _readings(source, seen)
    annotations = len(account.left_out) + sum(len(picture.annotations) for picture in pictures)
    conversion = Conversion(account, len(pictures), annotations, evidence)
    for picture, path, look in zip(pictures, paths, seen, strict=True):
        fault = _fault(picture, path, look)
        if fault is not None:
            account.note(fault, picture.name)
            for one in picture.annotations:
                account.leave_out(one, picture.name, fault)
            continue
        assert isinstance(look, Look), "else it has a fault"
        account.note(Rule.REORIENTED, picture.name, look.reoriented)
        objects = _objects(picture, look.size, readings, geometry, account)
        if picture.annotations and not objects:  # what it shows is not nothing
            account.note(Rule.ALL_LEFT_OUT, picture.name)
            continue
        if not objects:
            account.note(Rule.SKIPPED_IMAGE if skip_empty else Rule.EMPTY_IMAGE, picture.name)
        if order != "file":
            axes = (0, 1) if order == "left-to-right" else (1, 0)
            objects.sort(key=lambda item: [bounding_box(item.shape)[axis] for axis in axes])
        if objects or not skip_empty:
            conversion.records.append(_record(picture, path, look.size, objects, out))
    return conversion


def _readings(source: Source, seen: Sequence[Seen]) -> tuple[Readings, str]:
    """How to read the boxes of each stated scale, and of those of none; and the evidence."""
    boxes: dict[Scale | None, list[tuple[Any, Size | None]]] = {}
    for picture, look in zip(source.pictures, seen, strict=True):
        size = look.size if isinstance(look, Look) else picture.size
        for one in picture.annotations:
            if one.fault is None:
                boxes.setdefault(one.scale, []).append((one.box, size))
    readings, evidence = {}, []
    for scale, known in boxes.items():
        numbers, sizes = zip(*known, strict=True)
        found = find_reading(numbers, sizes, scale, source.corners)
        if isinstance(found, str):
            do = "State the scale with --scale: 0..1, 0..999, 0..1000 or pixels"
            raise ContractError("--scale", found, do)
        readings[scale] = found
        if scale is None or source.corners is None:
            evidence.append(f"{len(known)} boxes: {found.evidence}")
    return readings, "; ".join(evidence)


def _fault(picture: Picture, path: Path, look: Seen) -> Rule | None:
    """Why an image is left out, None where it is not."""
    if not os.path.isfile(path):
        return Rule.MISSING_IMAGE
    if isinstance(look, UnreadableImage):
        return Rule.UNREADABLE_IMAGE
    return None if picture.size in (None, look.size) else Rule.OTHER_SIZE


def _objects(
    picture: Picture, size: Size, readings: Readings, geometry: GeometryKind, account: Account
) -> list[GroundTruthObject]:
    found: dict[GroundTruthObject, None] = {}
    for one in picture.annotations:
        if one.fault is not None:
            item, rules = None, [one.fault]
        else:
            shape, rules = _shape_of(one, size, readings[one.scale], geometry)
            item = None if shape is None else GroundTruthObject(one.desc, shape)
        if item in found:
            item, rules = None, [Rule.DUPLICATE]
        if item is None:
            account.leave_out(one, picture.name, rules[0])
            continue
        found[item] = None
        for rule in rules:
            account.note(rule, one)
    return list(found)


Points = list[tuple[float, float]]


def _shape_of(
    one: Annotation, size: Size, reading: Reading, geometry: GeometryKind
) -> tuple[Shape | None, list[Rule]]:
    """The shape and how it was changed, or None and why there is none."""
    width, height = size
    x1, y1, x2, y2 = reading.pixels(one.box, size)
    shape, points, rules = None, [(x1, y1), (x2, y2)], list[Rule]()
    if geometry == "poly":
        x, y = reading.unit(size)
        flat = one.polygon or ()
        corners = [(a * x, b * y) for a, b in zip(flat[0::2], flat[1::2], strict=True)]
        shape = _shape("poly", corners, size)
        points, rules = (points, [Rule.NO_POLYGON]) if shape is None else (corners, [])
    if shape is None:
        if x2 <= x1 or y2 <= y1:
            return None, [Rule.NO_AREA]
        if x1 >= width or y1 >= height or x2 <= 0 or y2 <= 0:
            return None, [Rule.OUTSIDE]
        if (shape := _shape("bbox_2d", points, size)) is None:
            return None, [Rule.THIN]
    moved = (abs(a - b) for p in points for a, b in zip(p, _inside(p, size), strict=True))
    return shape, [*rules, Rule.CLIPPED] if max(moved) > _ROUNDING else rules


def _shape(kind: GeometryKind, points: Points, size: Size) -> Shape | None:
    """Points outside of the image move to its nearest edge; repeated ones of a polygon are one.

    None for a shape that covers no pixel of the canvas on which objects are matched.
    """
    inside = [_inside(point, size) for point in points]
    bins = [(encode_bin(x / size[0]), encode_bin(y / size[1])) for x, y in inside]
    if kind == "poly":
        bins = [point for i, point in enumerate(bins) if point != bins[i - 1]]
        if len(bins) < 3:
            return None
    shape = Shape(kind, tuple(k for point in bins for k in point))
    return shape if covers_a_pixel(shape, _CANVAS) else None


def _inside(point: tuple[float, float], size: Size) -> tuple[float, float]:
    return min(max(point[0], 0), size[0]), min(max(point[1], 0), size[1])


def _record(
    picture: Picture, path: Path, size: Size, objects: Sequence[GroundTruthObject], out: Path
) -> dict[str, Any]:
    # `..` leads out of the folder where a link points, so both are resolved; the image itself
    # keeps its name.
    image = os.path.relpath(path.parent.resolve() / path.name, out.parent.resolve())
    return {
        "images": [image],
        "width": size[0],
        "height": size[1],
        "objects": [{"desc": o.desc, o.shape.kind: list(o.shape.coords)} for o in objects],
        "metadata": {"image_id": picture.id, **picture.metadata},
    }


def write_records(conversion: Conversion, out: Path) -> None:
    """Publish a data file, whole or not at all.

    Raises ContractError when no image is left, or no object came of the annotations.
    """
    if not conversion.records:
        do = "See in the table why each was left out."
        raise ContractError(str(out), "no image is left to write", do)
    if conversion.annotations and not conversion.objects:
        raise ContractError(
            str(out),
            f"no object came of {conversion.annotations} annotations",
            "See in the table why each was left out; ids of images and categories must be equal, "
            'and "1" is not 1.',
        )
    write_lines(out, conversion.records)


def write_left_out(conversion: Conversion, source: Path, out: Path) -> None:
    """Publish a JSON line for each annotation of the file `source` that became no object."""
    left_out = conversion.account.left_out
    write_lines(out, [{"file": str(source), **left} for left in left_out])
