"""The data file: one sample a line (DATA-01).

    {"images": ["a.png"], "width": 640, "height": 480,
     "objects": [{"desc": "cat", "bbox_2d": [10, 20, "<|coord_300|>", 400]}],
     "metadata": {"split": "day"}}

`images` are paths, absolute or relative to the file; coordinates are norm1000 bins,
numbers (rounded) or coordinate tokens; `objects` may be empty; `metadata` may be left
out. Nothing else is allowed, so that a misspelt key is not lost in silence.

    scan           every line, with its sample or with all that is wrong with it
    read_samples   the samples of a file without a fault
"""

import math
import os
import re
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from learner.data.findings import Finding, capped
from learner.data.lines import EMPTY_LINE, BadLine, brief, parse_line, raw_lines
from learner.tokens import IM_END
from learner.types import GeometryKind, GroundTruthObject, Sample, Shape

MAX_BIN = 999
# More pixels than any image format here holds; tokens and areas stay numbers.
MAX_SIDE = 1_000_000

_SAMPLE_KEYS = {"images", "width", "height", "objects", "metadata"}
# Text that no target can hold: unpaired surrogates, special tokens.
_UNWRITABLE = re.compile(r"[\ud800-\udfff]|<\|\w+\|>")
_COORD_TOKEN = re.compile(r"<\|coord_(0|[1-9][0-9]{0,2})\|>")
_BOX_EXAMPLE = '"bbox_2d": [x1, y1, x2, y2] with 0 <= x1 <= x2 <= 999 and 0 <= y1 <= y2 <= 999'
_POLY_EXAMPLE = '"poly": [x1, y1, x2, y2, x3, y3, ...], at least three points in 0..999'


class Line(NamedTuple):
    """One line of a data file: a sample, or what is wrong with it."""

    sample: Sample | None
    problems: list[Finding]


def read_samples(path: Path, *, allow_poly: bool) -> list[Sample]:
    """Read and check a whole data file; images are looked up, not decoded.

    allow_poly: false where only boxes can be trained (`stage2_two_channel`).

    Raises:
        ContractErrors: what is wrong with the file, each as `file:line`; the first problems,
            and how many more there are.
    """
    samples: list[Sample] = []
    problems: list[Finding] = []
    for line in scan(path, allow_poly=allow_poly):
        problems.extend(line.problems)
        if line.sample is not None:
            samples.append(line.sample)
    if problems:
        raise capped(str(path), [problem.error() for problem in problems])
    return samples


def scan(path: Path, *, allow_poly: bool) -> Iterator[Line]:
    """Read a data file line by line; images are looked up, not decoded.

    Raises ContractError for a file that is not there, cannot be read or is empty.
    """
    for number, (raw, is_last) in enumerate(_with_last(raw_lines(path)), start=1):
        reader = _LineReader(path, number, allow_poly)
        sample = reader.read(raw, is_last)
        yield Line(sample, reader.problems)


def _with_last(lines: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether none follows."""
    for line, after in pairwise(chain(lines, [None])):
        assert line is not None
        yield line, after is None


def is_description(value: Any) -> TypeGuard[str]:
    """True for text that a target can hold: not blank, no unpaired surrogate or special token."""
    return _is_text(value) and _UNWRITABLE.search(value) is None


class _LineReader:
    """Turns one line into a sample, noting every problem of it in `problems`."""

    def __init__(self, path: Path, number: int, allow_poly: bool) -> None:
        self.sample_id = f"{path}:{number}"
        self.folder = path.parent
        self.allow_poly = allow_poly
        self.problems: list[Finding] = []

    def _wrong(self, kind: str, found: str, do: str) -> None:
        self.problems.append(Finding(kind, self.sample_id, found, do))

    def read(self, raw: bytes, is_last: bool) -> Sample | None:
        """The sample, or None when there is any problem."""
        try:
            record = parse_line(raw)
        except BadLine as bad:
            last = bad.kind == EMPTY_LINE and is_last
            self._wrong(bad.kind, f"{bad.found}, the last one" if last else bad.found, bad.do)
            return None
        self._only_known_keys(record)
        images = tuple(self._images(record))
        width = self._side(record, "width")
        height = self._side(record, "height")
        objects = tuple(self._objects(record))
        metadata = record.get("metadata", {})
        if not isinstance(metadata, dict):
            self._wrong(
                "metadata",
                f"metadata is {brief(metadata)}",
                "Make it a JSON object or leave it out.",
            )
        if self.problems:
            return None
        return Sample(self.sample_id, images, width, height, objects, metadata)

    def _only_known_keys(self, record: dict[str, Any]) -> None:
        if unknown := sorted(record.keys() - _SAMPLE_KEYS):
            self._wrong(
                "unknown key",
                f"unknown keys {', '.join(map(brief, unknown))}",
                'Use images, width, height and objects; anything else goes under "metadata".',
            )

    def _images(self, record: dict[str, Any]) -> Iterator[Path]:
        value = record.get("images")
        if not isinstance(value, list) or not value or not all(_is_text(v) for v in value):
            self._wrong(
                "images",
                f"images is {_told(record, 'images')}",
                'Give a list of paths: "images": ["a.png"].',
            )
            return
        for name in value:
            image = (self.folder / name).absolute()
            if not os.path.isfile(image):  # unlike Path.is_file, false for a name too long
                self._wrong(
                    "missing image",
                    f"image {name!r} is not at {image}",
                    "Put it there, or mend the path (relative to the data file, or absolute).",
                )
            yield image

    def _side(self, record: dict[str, Any], key: str) -> int:
        value = record.get(key)
        if type(value) is int and 1 <= value <= MAX_SIDE:
            return value
        self._wrong(
            "width or height",
            f"{key} is {_told(record, key)}",
            f"Give the image's side in pixels, a whole number from 1 to {MAX_SIDE}.",
        )
        return 0

    def _objects(self, record: dict[str, Any]) -> Iterator[GroundTruthObject]:
        value = record.get("objects")
        if not isinstance(value, list):
            self._wrong(
                "objects",
                f"objects is {_told(record, 'objects')}",
                "Give a list of objects; it may be empty.",
            )
            return
        for index, item in enumerate(value):
            where = f"objects[{index}]"
            if not isinstance(item, dict):
                self._wrong(
                    "objects",
                    f"{where} is {brief(item)}",
                    f'Write {{"desc": ..., {_BOX_EXAMPLE}}}.',
                )
                continue
            shape = self._shape(where, item)
            desc = self._desc(where, item)
            if shape is not None and desc is not None:
                yield GroundTruthObject(desc, shape)

    def _desc(self, where: str, item: dict[str, Any]) -> str | None:
        desc = item.get("desc")
        if is_description(desc):
            return desc
        self._wrong(
            "description",
            f"{where}.desc is {_told(item, 'desc')}",
            "Say what the object is, e.g. red square, in Unicode text without tokens like "
            f"{IM_END}.",
        )
        return None

    def _shape(self, where: str, item: dict[str, Any]) -> Shape | None:
        if (kind := self._kind(where, item)) is None:
            return None
        example = _BOX_EXAMPLE if kind == "bbox_2d" else _POLY_EXAMPLE
        values = item[kind]
        bins = [_as_bin(v) for v in values] if isinstance(values, list) else []
        coords = tuple(b for b in bins if b is not None)
        if len(coords) != len(bins) or not _well_formed(kind, coords):
            self._wrong("geometry", f"{where}.{kind} is {brief(values)}", f"Write {example}.")
            return None
        return Shape(kind, coords)

    def _kind(self, where: str, item: dict[str, Any]) -> GeometryKind | None:
        """The one geometry key of an object, None (and a note) if it is not exactly one."""
        keys = sorted(item.keys() - {"desc"})
        if keys == ["bbox_2d"]:
            return "bbox_2d"
        if keys == ["poly"] and self.allow_poly:
            return "poly"
        if keys == ["poly"]:
            self._wrong(
                "polygon",
                f"{where} has a poly, and this variant trains boxes only",
                "Give its bbox_2d, or leave the object out.",
            )
        else:
            allowed = "bbox_2d or poly" if self.allow_poly else "bbox_2d"
            self._wrong(
                "geometry",
                f"{where} has {', '.join(map(brief, keys)) or 'nothing'} beside its desc",
                f"Give exactly one geometry, {allowed}, and nothing else.",
            )
        return None


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def _told(mapping: dict[str, Any], key: str) -> str:
    return brief(mapping[key]) if key in mapping else "missing"


def _as_bin(value: Any) -> int | None:
    """The bin a number or a coordinate token stands for, None if it is neither."""
    if isinstance(value, str):
        token = _COORD_TOKEN.fullmatch(value)
        return int(token[1]) if token else None
    if isinstance(value, float) and math.isfinite(value):
        return round(value)
    return value if type(value) is int else None


def _well_formed(kind: GeometryKind, coords: tuple[int, ...]) -> bool:
    if not all(0 <= k <= MAX_BIN for k in coords):
        return False
    if kind == "poly":
        return len(coords) >= 6 and len(coords) % 2 == 0
    return len(coords) == 4 and coords[0] <= coords[2] and coords[1] <= coords[3]
