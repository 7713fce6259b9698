"""The rules of `learner data from-coco`, and the record of how often each was applied."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Rule(Enum):
    """Which images or annotations, and what becomes of them.

    An annotation falls under one of the rules that leave it out, or becomes an object.
    """

    MISSING_IMAGE = "images without a file", "left out"
    UNREADABLE_IMAGE = "images that cannot be decoded", "left out"
    OTHER_SIZE = "images of another size than annotated", "left out"
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


@dataclass
class Conversion:
    """records: lines of the data file. first: what each rule was first applied to."""

    records: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[Rule] = field(default_factory=Counter)
    first: dict[Rule, str] = field(default_factory=dict)

    @property
    def objects(self) -> int:
        return sum(len(record["objects"]) for record in self.records)

    def note(self, rule: Rule, about: str, times: int = 1) -> None:
        if times:
            self.counts[rule] += times
            self.first.setdefault(rule, about)
