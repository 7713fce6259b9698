"""Annotated images of another format, before their conversion to a data file.

    read_coco, read_yolo, read_voc, read_conversations   -> `Source`
    learner.data.conversion.convert                      -> lines of a data file

Reader and conversion share one `Account`, which counts changes and omissions by rule.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from learner.data.jsonl import Size, is_description
from learner.types import normalized
from shared_contracts.strict_model import shown

Scale = Literal["0..1", "0..999", "0..1000", "pixels"]
Corners = Literal["xyxy", "xywh"]
Order = Literal["file", "left-to-right", "top-to-bottom"]
Id = int | str


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
    """Return whether a value is a finite number within the range of a float."""
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
        """Record an omitted annotation. image: its file name, if the image is listed."""
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
