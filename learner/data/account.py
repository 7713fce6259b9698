"""The account of a conversion: what was changed or left out, by rule."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple


class Rule(Enum):
    """Which images or annotations, and what becomes of them.

    An annotation falls under one of the rules that leave it out, or becomes an object.
    """

    MISSING_IMAGE = "images without a file", "left out"
    UNREADABLE_IMAGE = "images that cannot be decoded", "left out"
    OTHER_SIZE = "images of another size than annotated", "left out"
    REORIENTED = "images that EXIF turns or mirrors", "taken as upright"
    REPEATED_IMAGE = "further records of one image", "put together"
    SKIPPED_IMAGE = "images that show no object", "left out"
    EMPTY_IMAGE = "images that show no object", "kept"
    ALL_LEFT_OUT = "images whose annotations were all left out", "left out"
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

    annotation_id: Any
    image_id: Any
    image: str | None
    bbox: Any
    reason: Rule


@dataclass
class Account:
    """counts: of images or annotations, by rule. first: what each rule was first applied to."""

    counts: Counter[Rule] = field(default_factory=Counter)
    first: dict[Rule, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    def note(self, rule: Rule, about: str, times: int = 1) -> None:
        if times:
            self.counts[rule] += times
            self.first.setdefault(rule, about)

    def add(self, other: "Account") -> None:
        for rule, count in other.counts.items():
            self.note(rule, other.first[rule], count)
        self.left_out += other.left_out
