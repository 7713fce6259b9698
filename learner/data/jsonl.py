"""The data file: one sample a line (DATA-01).

    {"images": ["a.png"], "width": 640, "height": 480,
     "objects": [{"desc": "cat", "bbox_2d": [10, 20, "<|coord_300|>", 400]}],
     "metadata": {"split": "day"}}

`images` are paths, absolute or relative to the file; coordinates are norm1000 bins: coordinate
tokens, or numbers and numeric strings (rounded); `objects` may be empty; `metadata` may be left
out; of it, evaluations read `CATEGORY_LISTS`. Nothing else is allowed, so that a misspelt key is
not lost in silence. Descriptions become
Unicode NFC (RES-20).

    scan           every line, with its sample or with all that is wrong with it
    read_samples   the samples of a file without a fault
    build_request  a sample as a conversation: the one prompt both server and learner encode

Only a newline ends a line; a carriage return before it and a byte-order mark at the start of
the file, which programs on Windows write, are taken as nothing. A line must be one object of
strict JSON: `NaN` and `Infinity` are refused, and so is a key given twice, of which Python
would keep the last one in silence.
"""

import codecs
import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

from learner.stages.tokens import IM_END
from learner.types import (
    CATEGORY_LISTS,
    GeometryKind,
    GroundTruthObject,
    Sample,
    Shape,
    normalized,
)
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.infer import ContentPart, ImagePart, Message, RolloutInferRequest, TextPart

MAX_SHOWN_ERRORS = 20


class DataProblem(ContractError):
    """What is wrong or doubtful with a line of a data file; `where` is `file:line`.

    kind: a few words under which a summary counts it. warning: a run takes the line as it is.
    """

    def __init__(
        self, kind: str, where: str, found: str, do: str, *, warning: bool = False
    ) -> None:
        super().__init__(where, found, do)
        self.kind = kind
        self.warning = warning


def capped(where: str, errors: Sequence[ContractError]) -> ContractErrors:
    """The first errors, and how many more there are."""
    hidden = len(errors) - MAX_SHOWN_ERRORS
    if hidden <= 0:
        return ContractErrors([*errors])
    more = ContractError(
        where,
        f"{hidden} more problems ({len(errors)} in all)",
        "Mend these first, then rerun.",
    )
    return ContractErrors([*errors[:MAX_SHOWN_ERRORS], more])


def bounding_box(shape: Shape) -> tuple[int, int, int, int]:
    """x1, y1, x2, y2 in bins; a box is its own."""
    xs, ys = shape.coords[0::2], shape.coords[1::2]
    return min(xs), min(ys), max(xs), max(ys)


_ONE_OBJECT = "Write one JSON object a line."
_SHOWN = 80
EMPTY_LINE, REPEATED_KEY = "empty line", "repeated key"


class BadLine(Exception):
    """A line that is no JSON object; the parts are those of a `DataProblem`."""

    def __init__(self, kind: str, found: str, do: str) -> None:
        super().__init__(kind, found, do)
        self.kind = kind
        self.found = found
        self.do = do


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, without their ends.

    Raises ContractError for a file that is not there, cannot be read or is empty.
    """
    if not path.is_file():
        found = "this is not a file" if path.exists() else "there is no such file"
        raise ContractError(str(path), found, "Name a JSONL file with one sample a line.")
    empty = True
    try:
        with path.open("rb") as file:
            for raw in file:
                line = raw.removeprefix(codecs.BOM_UTF8) if empty else raw
                empty = False
                yield line.removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise ContractError(
            str(path), f"it cannot be read ({error.strerror})", "Make it readable."
        ) from error
    if empty:
        raise ContractError(str(path), "the file has no samples", _ONE_OBJECT)


def read_text(path: Path, do: str) -> str:
    """The text of a file in UTF-8; ContractError, with what to do, where there is none."""
    if not path.is_file():
        found = "this is not a file" if path.exists() else "there is no such file"
        raise ContractError(str(path), found, do)
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(str(path), f"it cannot be read ({error})", do) from error


def load_json(path: Path, do: str, *, allow_nan: bool = False) -> Any:
    """The value in a file of strict JSON; raises as `read_text`."""
    try:
        return strict_json(read_text(path, do), allow_nan=allow_nan)
    except BadLine as bad:
        raise ContractError(str(path), bad.found, do) from bad


def parse_line(raw: bytes) -> dict[str, Any]:
    """The object of one line; raises `BadLine`."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} of the line is not UTF-8"
        raise BadLine("not UTF-8", found, "Save the file as UTF-8.") from error
    if not text.strip():
        raise BadLine(EMPTY_LINE, "the line is empty", "Remove it.")
    record = strict_json(text)
    if not isinstance(record, dict):
        raise BadLine("not a JSON object", f"{brief(record)} is no JSON object", _ONE_OBJECT)
    return record


def strict_json(text: str, *, allow_nan: bool = False) -> Any:
    """The value of a text of strict JSON; raises `BadLine`."""
    constant = float if allow_nan else _refuse
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at character {error.pos + 1}"
    except RecursionError:
        detail = "nested too deeply"
    except ValueError:  # more digits than Python turns into an int
        detail = "a number is too long"
    start = "".join(c if c.isprintable() else "?" for c in text[:_SHOWN])
    raise BadLine("not JSON", f"not JSON ({detail}): {start}", _ONE_OBJECT)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadLine(
            REPEATED_KEY,
            f"the key {brief(twice)} is given {keys.count(twice)} times in one object",
            "Keep one of them.",
        )
    return record


def _refuse(constant: str) -> NoReturn:
    raise BadLine(
        "not JSON", f"not JSON ({constant} is no number there)", "Write a number, or null."
    )


def brief(value: Any) -> str:
    """A value as JSON, at most 80 characters of it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "a value nested too deeply"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


MAX_BIN = 999
# More pixels than any image format here holds; tokens and areas stay numbers.
MAX_SIDE = 1_000_000

_SAMPLE_KEYS = {"images", "width", "height", "objects", "metadata"}
# Text that no target can hold: unpaired surrogates, special tokens.
_UNWRITABLE = re.compile(r"[\ud800-\udfff]|<\|\w+\|>")
_COORD_TOKEN = re.compile(r"<\|coord_(0|[1-9][0-9]{0,2})\|>")
FROM_PIXELS = f"x becomes {MAX_BIN} * x / width, y becomes {MAX_BIN} * y / height"
_BOX_EXAMPLE = '"bbox_2d": [x1, y1, x2, y2] with 0 <= x1 <= x2 <= 999 and 0 <= y1 <= y2 <= 999'
_POLY_EXAMPLE = '"poly": [x1, y1, x2, y2, x3, y3, ...], at least three points in 0..999'


class Line(NamedTuple):
    """One line of a data file: a sample, or what is wrong with it."""

    sample: Sample | None
    problems: list[DataProblem]


def read_samples(path: Path, *, allow_poly: bool, find_images: bool = True) -> list[Sample]:
    """Read and check a whole data file; images are looked up, not decoded.

    allow_poly: false where only boxes can be trained (`stage2_two_channel`).
    find_images: false where samples may lack their images, as something else finds out.

    Raises:
        ContractErrors: what is wrong with the file, each as `file:line`; the first problems,
            and how many more there are.
    """
    samples: list[Sample] = []
    problems: list[DataProblem] = []
    for line in scan(path, allow_poly=allow_poly, find_images=find_images):
        problems.extend(line.problems)
        if line.sample is not None:
            samples.append(line.sample)
    if problems:
        raise capped(str(path), problems)
    return samples


def scan(path: Path, *, allow_poly: bool, find_images: bool = True) -> Iterator[Line]:
    """Read a data file line by line; arguments as those of `read_samples`.

    Raises ContractError for a file that is not there, cannot be read or is empty.
    """
    for number, (raw, is_last) in enumerate(_with_last(raw_lines(path)), start=1):
        reader = _LineReader(path, number, allow_poly, find_images)
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

    def __init__(self, path: Path, number: int, allow_poly: bool, find_images: bool) -> None:
        self.sample_id = f"{path}:{number}"
        self.folder = path.parent
        self.allow_poly = allow_poly
        self.find_images = find_images
        self.problems: list[DataProblem] = []

    def _wrong(self, kind: str, found: str, do: str) -> None:
        self.problems.append(DataProblem(kind, self.sample_id, found, do))

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
        self._check_metadata(metadata)
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

    def _check_metadata(self, metadata: Any) -> None:
        if not isinstance(metadata, dict):
            self._wrong(
                "metadata",
                f"metadata is {brief(metadata)}",
                "Make it a JSON object or leave it out.",
            )
            return
        for key in CATEGORY_LISTS:
            names = metadata.get(key, [])
            if not isinstance(names, list) or not all(map(is_description, names)):
                found = f"metadata.{key} is {brief(names)}"
                self._wrong("metadata", found, "Make it a list of descriptions or leave it out.")

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
            # os.path.isfile is false for a name that is too long, and Path.is_file raises
            if self.find_images and not os.path.isfile(image):
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
            return normalized(desc)
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
            beyond = any(bin > MAX_BIN for bin in coords)
            pixels = f" Numbers above {MAX_BIN} look like pixels: {FROM_PIXELS}." if beyond else ""
            do = f"Write {example}.{pixels}"
            self._wrong("geometry", f"{where}.{kind} is {brief(values)}", do)
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
    """The bin of a coordinate token, else `int(round(float(value)))` (RES-24); None of neither."""
    if isinstance(value, str) and (token := _COORD_TOKEN.fullmatch(value)):
        return int(token[1])
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return round(float(value))
    except (ValueError, OverflowError):  # no number, NaN, infinite or too large
        return None


def _well_formed(kind: GeometryKind, coords: tuple[int, ...]) -> bool:
    if not all(0 <= k <= MAX_BIN for k in coords):
        return False
    if kind == "poly":
        return len(coords) >= 6 and len(coords) % 2 == 0
    return len(coords) == 4 and coords[0] <= coords[2] and coords[1] <= coords[3]


def build_messages(sample: Sample, prompt: str, system: str | None) -> list[Message]:
    """System text if any, then one user turn: the images, then the instruction."""
    content: list[ContentPart] = [ImagePart(type="image") for _ in sample.images]
    content.append(TextPart(type="text", text=prompt))
    messages = [Message(role="system", content=system)] if system is not None else []
    return [*messages, Message(role="user", content=content)]


def build_request(sample: Sample, prompt: str, system: str | None) -> RolloutInferRequest:
    """The `/infer/` request of a sample; images travel as paths the server can read."""
    return RolloutInferRequest(
        messages=build_messages(sample, prompt, system),
        images=[str(path) for path in sample.images],
        uuid=sample.sample_id,
    )
