"""Annotated images of another format, before their conversion to a data file.

A reader returns a `Source`. Reader and conversion share one `Account`, which counts changes and
omissions by rule. A file has one scale and one order of box numbers, stated or inferred from all
boxes. Scales: fractions, bins (0 to 999), thousandths (0 to 1000) or pixels. Orders: two corners,
or a corner with width and height.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from learner.data.jsonl import Size, is_description
from learner.types import normalized
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import shown

Scale = Literal["0..1", "0..999", "0..1000", "pixels"]
Corners = Literal["xyxy", "xywh"]
Order = Literal["file", "left-to-right", "top-to-bottom"]
Id = int | str
Numbers = tuple[float, float, float, float]
_UNIT: dict[Scale, float] = {"0..1": 1, "0..999": 999, "0..1000": 1000}
# Likelihood ratio that decides between pixels and parts of the image.
_ODDS = 100.0
# Fewest boxes that show whether they are as usual.
_FEWEST = 5
# Highest share of boxes that may be faulty, such as x2 < x1.
FAULTY = 0.1


class Rule(Enum):
    """What a rule applies to, and what is done with it.

    Each annotation becomes an object, or is left out under exactly one rule.
    """

    def __init__(self, what: str, done: str) -> None:
        self.what = what
        self.done = done

    MISSING_IMAGE = "images without a file", "left out"
    UNREADABLE_IMAGE = "images that cannot be decoded", "left out"
    OTHER_SIZE = "images of another size than annotated", "left out"
    REORIENTED = "images that EXIF turns or mirrors", "taken as upright"
    REPEATED_IMAGE = "further records of one image", "put together"
    SKIPPED_IMAGE = "images that show no object", "left out"
    EMPTY_IMAGE = "images that show no object", "kept"
    ALL_LEFT_OUT = "images whose annotations were all left out", "left out"
    BAD_IMAGE = "image records without id or file name", "left out"
    NO_BOXES = "records without a list of boxes", "left out"
    UNKNOWN_IMAGE = "annotations of an image that is not listed", "left out"
    OF_IMAGE_LEFT_OUT = "annotations of an image left out", "left out"
    UNUSABLE = "annotations that cannot be read", "left out"
    NO_NAME = "annotations without a name that can be written", "left out"
    CROWD = "annotations of a crowd", "left out"
    UNKNOWN_CATEGORY = "annotations of a category that is not listed", "left out"
    NO_AREA = "annotations of no area", "left out"
    OUTSIDE = "annotations outside of the image", "left out"
    THIN = "annotations too thin to match", "left out"
    DUPLICATE = "annotations like another in every bin", "left out"
    REPEATED_ID = "annotations with the id of another", "kept"
    CLIPPED = "annotations partly outside of the image", "clipped"
    NO_BOX = "annotations without a box", "box of the mask taken"
    NO_POLYGON = "annotations without exactly one polygon that can be matched", "box taken"
    POLYGONS = "polygons", "boxes written"
    BOXES = "boxes", "polygons written"


class Annotation(NamedTuple):
    """box, polygon: numbers as in the file. fault: the rule that leaves the annotation out.

    scale, corners: as the format or the record states them; None: not stated.
    """

    id: Id | None
    image_id: Id | None
    desc: str
    box: Any
    polygon: Sequence[float] | None = None
    scale: Scale | None = None
    corners: Corners | None = None
    fault: Rule | None = None

    @classmethod
    def read(
        cls, id: Any, image_id: Any, name: Any, box: Any, fault: Rule | None = None, **more: Any
    ) -> "Annotation":
        """Return an annotation; `fault` is set unless box and name are valid."""
        if not (isinstance(box, list | tuple) and len(box) == 4 and all(map(is_number, box))):
            fault = Rule.UNUSABLE
        if fault is None and not is_description(name):
            fault = Rule.NO_NAME
        return cls(id, image_id, normalized(str(name)), box, fault=fault, **more)

    def __str__(self) -> str:
        return (
            f"annotation of image {self.image_id}" if self.id is None else f"annotation {self.id}"
        )


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


@dataclass
class SourceImage:
    """name: file path relative to `Source.folder`. size: annotated size, if any."""

    id: Id
    name: str
    size: Size | None
    annotations: list[Annotation] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Account:
    """counts: images or annotations by rule. first: the first example of each rule.

    left_out: a record with its reason for each annotation that became no object.
    totals: each count, of what, and what it became. evidence: for the inferred reading of boxes.
    """

    counts: Counter[Rule] = field(default_factory=Counter)
    first: dict[Rule, str] = field(default_factory=dict)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    totals: list[tuple[int, str, str]] = field(default_factory=list)
    evidence: str = ""

    def note(self, rule: Rule, about: object, times: int = 1) -> None:
        if times:
            self.counts[rule] += times
            self.first.setdefault(rule, str(about))

    def leave_out(self, one: Annotation, image: str | None, reason: Rule) -> None:
        ids = {"annotation_id": one.id, "image_id": one.image_id}
        box = json.loads(json.dumps(one.box), parse_constant=lambda _: None)  # null for NaN
        self.left_out.append({**ids, "image": image, "bbox": box, "reason": reason.what})
        counted = Rule.OF_IMAGE_LEFT_OUT if reason.what.startswith("images") else reason
        self.note(counted, f"{one}: {shown(one.box)}" if reason is Rule.UNUSABLE else one)


@dataclass
class Source:
    """folder: base of picture names.

    usual: scale and order of the format for boxes that do not state them; None: inferred.
    """

    folder: Path
    pictures: list[SourceImage]
    account: Account
    usual: tuple[Scale, Corners] | None = None


class Reading(NamedTuple):
    """An interpretation of box numbers; evidence: the reason for it, as text, if inferred."""

    scale: Scale
    corners: Corners
    evidence: str = ""

    def unit(self, size: Size) -> tuple[float, float]:
        """Return the pixels of one unit of x and of y, for an image size in pixels."""
        if self.scale == "pixels":
            return 1.0, 1.0
        return size[0] / _UNIT[self.scale], size[1] / _UNIT[self.scale]

    def pixels(self, box: Numbers, size: Size) -> Numbers:
        """Return x1, y1, x2, y2 in pixels."""
        (a, b, c, d), (x, y) = _two_corners(box, self.corners), self.unit(size)
        return a * x, b * y, c * x, d * y

    def count_inside(self, boxes: Iterable[tuple[Numbers, Size]]) -> int:
        """Return the number of boxes that end in their images, or up to one pixel outside."""
        count = 0
        for box, size in boxes:
            x1, y1, x2, y2 = self.pixels(box, size)
            count += x1 <= x2 <= size[0] + 1 and y1 <= y2 <= size[1] + 1
        return count


def find_reading(
    boxes: Sequence[tuple[Numbers, Size | None]],
    scale: Scale | None = None,
    corners: Corners | None = None,
    usual: tuple[Scale, Corners] | None = None,
) -> Reading:
    """Return the reading of boxes, each given with the size of its image, if that is known.

    scale, corners: as stated; None: the format's `usual` ones, or inferred from all boxes.

    Raises ContractError for an ambiguous scale, and for boxes that do not look usual.
    """
    known = [(box, size) for box, size in boxes if size is not None]
    if usual is not None:
        if len(boxes) >= _FEWEST:
            _require_usual([box for box, _ in boxes], known, usual, scale, corners)
        return Reading(scale or usual[0], corners or usual[1])
    if scale and corners:
        return Reading(scale, corners)
    order, ordered = (corners, "as stated") if corners else _find_corners(boxes)
    ends = [(_two_corners(box, order), size) for box, size in known]
    found, why = (scale, "as stated") if scale else _find_scale(ends)
    if found is None:
        do = "State the scale with --scale: 0..1, 0..999, 0..1000 or pixels"
        raise ContractError("--scale", why, do)
    return Reading(found, order, f"{order} ({ordered}), {found} ({why})")


def _require_usual(
    boxes: Sequence[Numbers],
    known: Sequence[tuple[Numbers, Size]],
    usual: tuple[Scale, Corners],
    scale: Scale | None,
    corners: Corners | None,
) -> None:
    """Raise ContractError for boxes like fractions or of the other order, if that is not stated."""
    if scale is None and max(map(max, boxes)) <= 1:
        found = f"no number of {len(boxes)} boxes is above 1, and this format's are {usual[0]}"
        raise ContractError("--scale", found, "State the scale: --scale 0..1, or --scale pixels")
    orders: tuple[Corners, Corners] = ("xywh", "xyxy")
    outside = {
        order: len(known) - Reading(scale or usual[0], order).count_inside(known)
        for order in orders
    }
    own, (other,) = outside.pop(usual[1]), outside
    if corners is None and own > len(known) / 2 and outside[other] <= FAULTY * len(known):
        found = (
            f"as {usual[1]} {own} of {len(known)} boxes leave their images, and as {other} "
            f"{outside[other]}"
        )
        do = "State the order: --boxes xyxy for two corners, or --boxes xywh"
        raise ContractError("--boxes", found, do)


def _two_corners(box: Numbers, corners: Corners) -> Numbers:
    a, b, c, d = box
    return (a, b, a + c, b + d) if corners == "xywh" else box


def bounding_xywh(flat: Sequence[float]) -> list[float]:
    """Return x, y, width, height of the bounding box of flat points x, y, ..."""
    xs, ys = flat[0::2], flat[1::2]
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def _find_corners(boxes: Sequence[tuple[Numbers, Any]]) -> tuple[Corners, str]:
    """Return "xyxy" unless more than `FAULTY` of the boxes would be reversed; and the evidence."""
    backward = sum(c < a or d < b for (a, b, c, d), _ in boxes)
    if backward <= FAULTY * len(boxes):
        return "xyxy", f"the third number is below the first in {backward} of {len(boxes)}"
    return "xywh", f"as two corners, {backward} of {len(boxes)} would be reversed"


def _find_scale(boxes: Sequence[tuple[Numbers, Size]]) -> tuple[Scale | None, str]:
    """Return the scale, or None if it is ambiguous, and the evidence.

    Compares the likelihoods of pixels and of parts (bins, thousandths), for uniform corners.
    parts: the probability that parts, read as pixels, fit into images below 1,000 pixels.
    pixels: the probability that pixels of images above 1,000 pixels are all at most 1,000.
    """
    numbers = [number for box, _ in boxes for number in box]
    if not numbers:
        return "pixels", "there are no boxes"
    largest = max(numbers)
    if largest <= 1:
        return "0..1", f"no number of {len(numbers):,} is above 1"
    above = sum(number > _UNIT["0..1000"] for number in numbers)
    outside = sum(x2 > w or y2 > h for (_, _, x2, y2), (w, h) in boxes)
    parts, pixels = 1.0, 1.0
    for _, (width, height) in boxes:
        parts *= min(width / 1000, 1) * min(height / 1000, 1)
        pixels *= min(1000 / width, 1) * min(1000 / height, 1)
    if above > FAULTY * len(numbers) or (above and outside <= FAULTY * len(boxes)):
        return "pixels", f"{above:,} of {len(numbers):,} numbers are above 1,000"
    if outside <= FAULTY * len(boxes) and parts * _ODDS < pixels:
        return "pixels", f"{len(boxes) - outside:,} of {len(boxes):,} lie in their images as pixels"
    if not above and (outside > FAULTY * len(boxes) or pixels * _ODDS < parts):
        ends = sum(number == _UNIT["0..1000"] for number in numbers)
        if largest <= _UNIT["0..999"] and _UNIT["0..999"] in numbers:
            return "0..999", f"no number of {len(numbers):,} is above 999"
        if not ends:
            found = f"no number of {len(numbers):,} is above {largest:g}"
            return "0..1000", f"{found}: 0..999 is possible, too, and Qwen3-VL's scale is taken"
        found = f"no number is above 1,000, and {ends:,} of {len(numbers):,} are 1,000"
        return "0..1000", f"{found}: this is Qwen3-VL's scale"
    return None, (
        f"{len(boxes):,} boxes fit as pixels and as parts of their images: the largest number is "
        f"{largest:g}, and {outside:,} boxes are outside of their images as pixels"
    )
