"""The data file: one sample a line (DATA-01).

    {"images": ["a.png"], "width": 640, "height": 480,
     "objects": [{"desc": "cat", "bbox_2d": [10, 20, "<|coord_300|>", 400]}],
     "metadata": {"split": "day"}}

`images` are paths, absolute or relative to the file. Coordinates are norm1000 bins: coordinate
tokens, numbers, or numeric strings (both rounded). `objects` may be empty. `metadata` is optional;
evaluations read its `CATEGORY_LISTS`. Unknown keys are errors. Descriptions become Unicode NFC
(RES-20). A newline ends a line; a carriage return before it and a byte-order mark at the start of
the file are ignored.
"""

import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from learner.data.files import DataProblem, capped, parse_line, raw_lines, require_jsonl
from learner.stages.tokens import IM_END
from learner.types import (
    CATEGORY_LISTS,
    GeometryKind,
    GroundTruthObject,
    Sample,
    Shape,
    normalized,
)
from shared_contracts.errors import ContractError
from shared_contracts.infer import ContentPart, ImagePart, Message, RolloutInferRequest, TextPart
from shared_contracts.strict_model import shown

MAX_BIN = 999
# Above the limit of every supported image format; keeps token counts and areas finite.
MAX_SIDE = 1_000_000
Box = tuple[int, int, int, int]
Size = tuple[int, int]
# Text that a target cannot contain: unpaired surrogates, special tokens.
_UNWRITABLE = re.compile(r"[\ud800-\udfff]|<\|\w+\|>")
_COORD_TOKEN = re.compile(r"<\|coord_(0|[1-9][0-9]{0,2})\|>")
_EXAMPLES: dict[GeometryKind, str] = {
    "bbox_2d": '"bbox_2d": [x1, y1, x2, y2] with 0 <= x1 <= x2 <= 999 and 0 <= y1 <= y2 <= 999',
    "poly": '"poly": [x1, y1, x2, y2, x3, y3, ...], at least three points in 0..999',
}


def bounding_box(shape: Shape) -> Box:
    """Return x1, y1, x2, y2 in bins."""
    xs, ys = shape.coords[0::2], shape.coords[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def read_samples(path: Path, *, allow_poly: bool) -> list[Sample]:
    """Read and check a data file as `DataFile` does.

    Raises:
        ContractErrors: the first problems, each at `file:line`, and the number of the others.
    """
    return DataFile(path, allow_poly=allow_poly).valid_samples()


def is_description(value: Any) -> TypeGuard[str]:
    """Return whether a target can contain the value: text, not blank, not `_UNWRITABLE`."""
    return _is_text(value) and _UNWRITABLE.search(value) is None


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def is_side(value: Any) -> bool:
    """Return whether a value is a side of an image in pixels."""
    return type(value) is int and 1 <= value <= MAX_SIDE


def _is_metadata(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    lists = [value[key] for key in CATEGORY_LISTS if key in value]
    return all(isinstance(names, list) and all(map(is_description, names)) for names in lists)


_SIDE = f"Give the image's side in pixels, a whole number from 1 to {MAX_SIDE}."
_METADATA = f"with lists of descriptions for {' and '.join(CATEGORY_LISTS)}."
# Key of a line -> the kind of its problem, its test, what replaces an invalid value, the remedy.
_KEYS: dict[str, tuple[str, Callable[[Any], bool], Any, str]] = {
    "images": (
        "images",
        lambda value: isinstance(value, list) and value != [] and all(map(_is_text, value)),
        [],
        'Give a list of paths: "images": ["a.png"].',
    ),
    "width": ("width or height", is_side, 0, _SIDE),
    "height": ("width or height", is_side, 0, _SIDE),
    "objects": (
        "objects",
        lambda value: isinstance(value, list),
        [],
        "Give a list of objects; it may be empty.",
    ),
    "metadata": ("metadata", _is_metadata, {}, f"Make it a JSON object, {_METADATA}"),
}


def line_of(problem: ContractError) -> int:
    return int(problem.where.rpartition(":")[2])


class DataFile:
    """A data file as it was read; image files are not opened.

    allow_poly: False if the trainer variant supports boxes only (`stage2_two_channel`).
    lines: number of lines to read; None: all.

    samples: of the valid lines. findings: problems of the others; checks add their own.
    boxes: of all objects with four numbers or more, also out of range: the sample id, the rounded
    bounding box, and the size of the image.

    Raises ContractError for a missing, unreadable or empty file, and for one of another format.
    """

    def __init__(self, path: Path, *, allow_poly: bool, lines: int | None = None) -> None:
        require_jsonl(path)
        self.path = path
        self.samples: list[Sample] = []
        self.findings: list[DataProblem] = []
        self.boxes: list[tuple[str, Box, Size]] = []
        self._kinds: Sequence[GeometryKind] = ("bbox_2d", "poly") if allow_poly else ("bbox_2d",)
        for number, raw in enumerate(islice(raw_lines(path), lines), start=1):
            self._sample_id, before = f"{path}:{number}", len(self.findings)
            sample = self._read(raw)
            if sample is not None and len(self.findings) == before:
                self.samples.append(sample)

    @property
    def objects(self) -> int:
        return sum(len(sample.objects) for sample in self.samples)

    def valid_samples(self) -> list[Sample]:
        """Return the samples; raises ContractErrors if there is any finding, in line order."""
        if self.findings:
            raise capped(str(self.path), sorted(self.findings, key=line_of))
        return self.samples

    def _wrong(self, kind: str, found: str, do: str) -> None:
        self.findings.append(DataProblem(kind, self._sample_id, found, do))

    def _read(self, raw: bytes) -> Sample | None:
        """Return the sample of a line; None, or an incomplete one, after adding a problem."""
        try:
            record = {"metadata": {}} | parse_line(raw, self._sample_id)
        except DataProblem as problem:
            self.findings.append(problem)
            return None
        if unknown := sorted(record.keys() - _KEYS):
            do = 'Use images, width, height and objects; anything else goes under "metadata".'
            self._wrong("unknown key", f"unknown keys {', '.join(map(shown, unknown))}", do)
        for key, (kind, is_valid, instead, do) in _KEYS.items():
            if not is_valid(record.get(key)):
                self._wrong(kind, f"{key} is {_value_of(record, key)}", do)
                record[key] = instead
        images = tuple((self.path.parent / name).absolute() for name in record["images"])
        size = record["width"], record["height"]
        items = enumerate(record["objects"])
        objects = [self._object(f"objects[{index}]", item, size) for index, item in items]
        valid = tuple(item for item in objects if item is not None)
        return Sample(self._sample_id, images, *size, valid, record["metadata"])

    def _object(self, where: str, item: Any, size: Size) -> GroundTruthObject | None:
        """Return the object, or None after adding a problem."""
        if not isinstance(item, dict):
            do = f'Write {{"desc": ..., {_EXAMPLES["bbox_2d"]}}}.'
            self._wrong("objects", f"{where} is {shown(item)}", do)
            return None
        shape = self._shape(where, item, size)
        if is_description(desc := item.get("desc")):
            return None if shape is None else GroundTruthObject(normalized(desc), shape)
        do = f"Name the object, e.g. red square, in Unicode text without tokens like {IM_END}."
        self._wrong("description", f"{where}.desc is {_value_of(item, 'desc')}", do)
        return None

    def _shape(self, where: str, item: dict[str, Any], size: Size) -> Shape | None:
        keys = sorted(item.keys() - {"desc"})
        kind = next((each for each in self._kinds if keys == [each]), None)
        if kind is None:
            found = f"{where} has {', '.join(map(shown, keys)) or 'nothing'} beside its desc"
            only = "; this variant trains boxes only" if len(self._kinds) == 1 else ""
            do = f"Give exactly one geometry, {' or '.join(self._kinds)}, and nothing else{only}."
            self._wrong("geometry", found, do)
            return None
        values = item[kind]
        bins = [_as_bin(v) for v in values] if isinstance(values, list) else []
        coords = tuple(b for b in bins if b is not None)
        if len(coords) == len(bins) >= 4:
            x1, y1, x2, y2 = coords[:4] if kind == "bbox_2d" else bounding_box(Shape(kind, coords))
            if all(size):
                self.boxes.append((self._sample_id, (x1, y1, x2, y2), size))
            if _well_formed(kind, coords):
                return Shape(kind, coords)
        found = f"{where}.{kind} is {shown(values)}"
        self._wrong("geometry", found, f"Write {_EXAMPLES[kind]}.")
        return None


def _value_of(mapping: dict[str, Any], key: str) -> str:
    return shown(mapping[key]) if key in mapping else "missing"


def _as_bin(value: Any) -> int | None:
    """Return the bin of a coordinate token or number (RES-24), rounded; None if it is neither."""
    if isinstance(value, str) and (token := _COORD_TOKEN.fullmatch(value)):
        return int(token[1])
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return round(float(value))
    except (ValueError, OverflowError):  # not a number, NaN, infinite or too large
        return None


def _well_formed(kind: GeometryKind, coords: tuple[int, ...]) -> bool:
    if kind == "poly":
        fits = len(coords) >= 6 and len(coords) % 2 == 0
    else:
        fits = len(coords) == 4 and coords[0] <= coords[2] and coords[1] <= coords[3]
    return fits and all(0 <= k <= MAX_BIN for k in coords)


def build_request(sample: Sample, prompt: str, system: str | None) -> RolloutInferRequest:
    """Return the `/infer/` request of a sample; images are paths that the server reads.

    It has the system message, if any, and one user message: images, then the prompt.
    """
    content: list[ContentPart] = [ImagePart(type="image") for _ in sample.images]
    content.append(TextPart(type="text", text=prompt))
    messages = [Message(role="system", content=system)] if system is not None else []
    return RolloutInferRequest(
        messages=[*messages, Message(role="user", content=content)],
        images=[str(path) for path in sample.images],
        uuid=sample.sample_id,
    )
