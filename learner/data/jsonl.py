"""The data file: one sample a line (DATA-01).

    {"images": ["a.png"], "width": 640, "height": 480,
     "objects": [{"desc": "cat", "bbox_2d": [10, 20, "<|coord_300|>", 400]}],
     "metadata": {"split": "day"}}

`images` are paths, absolute or relative to the file; coordinates are norm1000 bins,
numbers (rounded) or coordinate tokens; `objects` may be empty; `metadata` may be left
out. Nothing else is allowed, so that a misspelt key is not lost in silence.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from learner.tokens import IM_END
from learner.types import GeometryKind, GroundTruthObject, Sample, Shape
from shared_contracts.errors import ContractError, ContractErrors

MAX_SHOWN_ERRORS = 20
MAX_BIN = 999

_SAMPLE_KEYS = {"images", "width", "height", "objects", "metadata"}
_SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")
_COORD_TOKEN = re.compile(r"<\|coord_(\d{1,3})\|>")
_BOX_EXAMPLE = '"bbox_2d": [x1, y1, x2, y2] with 0 <= x1 <= x2 <= 999 and 0 <= y1 <= y2 <= 999'
_POLY_EXAMPLE = '"poly": [x1, y1, x2, y2, x3, y3, ...], at least three points in 0..999'


def read_samples(path: Path, *, allow_poly: bool) -> list[Sample]:
    """Read and check a whole data file; images are looked up, not decoded.

    allow_poly: false where only boxes can be trained (`stage2_two_channel`).

    Raises:
        ContractErrors: everything wrong with the file, each as `file:line`.
    """
    samples: list[Sample] = []
    errors: list[ContractError] = []
    for number, line in enumerate(_lines(path), start=1):
        reader = _LineReader(path, number, allow_poly)
        sample = reader.read(line)
        errors.extend(reader.errors)
        if sample is not None:
            samples.append(sample)
    if errors:
        raise ContractErrors(_capped(path, errors))
    return samples


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        found = "this is not a file" if path.exists() else "there is no such file"
        raise ContractError(str(path), found, "Name a JSONL file with one sample a line.")
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ContractError(
            str(path), f"byte {error.start} is not UTF-8", "Save the file as UTF-8."
        ) from error
    if not any(line.strip() for line in lines):
        raise ContractError(str(path), "the file has no samples", "Write one JSON object a line.")
    return lines


def _capped(path: Path, errors: list[ContractError]) -> list[ContractError]:
    hidden = len(errors) - MAX_SHOWN_ERRORS
    if hidden <= 0:
        return errors
    more = ContractError(
        str(path),
        f"{hidden} more problems ({len(errors)} in all)",
        "Mend these first, then rerun.",
    )
    return [*errors[:MAX_SHOWN_ERRORS], more]


class _LineReader:
    """Turns one line into a sample, noting every problem of it in `errors`."""

    def __init__(self, path: Path, number: int, allow_poly: bool) -> None:
        self.sample_id = f"{path}:{number}"
        self.folder = path.parent
        self.allow_poly = allow_poly
        self.errors: list[ContractError] = []

    def _wrong(self, found: str, do: str) -> None:
        self.errors.append(ContractError(self.sample_id, found, do))

    def read(self, line: str) -> Sample | None:
        """The sample, or None when there is any problem."""
        record = self._record(line)
        if record is None:
            return None
        images = tuple(self._images(record.get("images")))
        width = self._side(record, "width")
        height = self._side(record, "height")
        objects = tuple(self._objects(record.get("objects")))
        metadata = record.get("metadata", {})
        if not isinstance(metadata, dict):
            self._wrong(
                f"metadata is {_brief(metadata)}",
                "Make it a JSON object or leave it out.",
            )
        if self.errors:
            return None
        return Sample(self.sample_id, images, width, height, objects, metadata)

    def _record(self, line: str) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            detail = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            self._wrong(f"not JSON ({detail}): {_brief(line)}", "Write one JSON object a line.")
            return None
        if not isinstance(record, dict):
            self._wrong(f"found {_brief(record)}", "Write one JSON object a line.")
            return None
        if unknown := sorted(record.keys() - _SAMPLE_KEYS):
            self._wrong(
                f"unknown keys {', '.join(unknown)}",
                'Use images, width, height and objects; anything else goes under "metadata".',
            )
        return record

    def _images(self, value: Any) -> Iterator[Path]:
        if not isinstance(value, list) or not value or not all(_is_text(v) for v in value):
            self._wrong(
                f"images is {_brief(value)}",
                'Give a list of paths: "images": ["a.png"].',
            )
            return
        for name in value:
            image = (self.folder / name).absolute()
            if not image.is_file():
                self._wrong(
                    f"image {name!r} is not at {image}",
                    "Put it there, or mend the path (relative to the data file, or absolute).",
                )
            yield image

    def _side(self, record: dict[str, Any], key: str) -> int:
        value = record.get(key)
        if type(value) is int and value > 0:
            return value
        self._wrong(f"{key} is {_brief(value)}", "Give the image's side in pixels, 1 or more.")
        return 0

    def _objects(self, value: Any) -> Iterator[GroundTruthObject]:
        if not isinstance(value, list):
            self._wrong(
                f"objects is {_brief(value)}",
                "Give a list of objects; it may be empty.",
            )
            return
        for index, item in enumerate(value):
            where = f"objects[{index}]"
            if not isinstance(item, dict):
                self._wrong(
                    f"{where} is {_brief(item)}",
                    f'Write {{"desc": ..., {_BOX_EXAMPLE}}}.',
                )
                continue
            shape = self._shape(where, item)
            desc = self._desc(where, item)
            if shape is not None and desc is not None:
                yield GroundTruthObject(desc, shape)

    def _desc(self, where: str, item: dict[str, Any]) -> str | None:
        desc = item.get("desc")
        if _is_text(desc) and _is_writable(desc):
            return desc
        self._wrong(
            f"{where}.desc is {_brief(desc)}",
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
            self._wrong(f"{where}.{kind} is {_brief(values)}", f"Write {example}.")
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
                f"{where} has a poly, and this variant trains boxes only",
                "Give its bbox_2d, or leave the object out.",
            )
        else:
            allowed = "bbox_2d or poly" if self.allow_poly else "bbox_2d"
            self._wrong(
                f"{where} has {', '.join(keys) or 'nothing'} beside its desc",
                f"Give exactly one geometry, {allowed}, and nothing else.",
            )
        return None


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def _as_bin(value: Any) -> int | None:
    """The bin a number or a coordinate token stands for, None if it is neither."""
    if isinstance(value, str):
        token = _COORD_TOKEN.fullmatch(value)
        return int(token[1]) if token else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return round(float(value))


def _well_formed(kind: GeometryKind, coords: tuple[int, ...]) -> bool:
    if not all(0 <= k <= MAX_BIN for k in coords):
        return False
    if kind == "poly":
        return len(coords) >= 6 and len(coords) % 2 == 0
    return len(coords) == 4 and coords[0] <= coords[2] and coords[1] <= coords[3]


def _brief(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_writable(desc: str) -> bool:
    """False for text that no target can hold: unpaired surrogates, special tokens."""
    surrogate = any("\ud800" <= character <= "\udfff" for character in desc)
    return not surrogate and _SPECIAL_TOKEN.search(desc) is None
