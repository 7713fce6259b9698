"""What answer formats in JSON share: judging and writing an object. `json_scanner` finds it.

{"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}
"""

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from learner.stages.coords import COORD_BINS, coord_token
from learner.stages.formats import AnswerFormat
from learner.stages.formats.answer_text import (
    WHITE_SPACE,
    Answer,
    Entry,
    Scan,
    lead_in,
    shape_fault,
)
from learner.stages.formats.json_scanner import JsonScanner
from learner.types import (
    AnswerFault,
    DropReason,
    FieldOrder,
    GeometryKind,
    GroundTruthObject,
    ParsedObject,
)

GEOMETRY_KEYS = ("bbox_2d", "poly")

_SURROGATE = re.compile("[\ud800-\udfff]")
# An object of these formats with no key, or in other brackets than the format's.
_NO_CONTAINER = re.compile(r'[\s{\[]*"desc"\s*:|\s*\{\s*[{\[]')

# How each bin may be written in an array: quoted, or bare and read as a number.
_SPELLINGS = [(coord_token(k), k) for k in range(COORD_BINS)]
_SPELLED = re.compile(r"<\|coord_[0-9]{1,3}\|>")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Strict JSON: no NaN, no Infinity; an object reads as the list of its pairs.
_DECODER = json.JSONDecoder(
    object_pairs_hook=list, parse_constant=_refuse_constant, parse_int=float
)


class JsonFormat(AnswerFormat):
    """The common part of the formats in JSON; a format is a subclass.

    is_list: as in `JsonScanner`.
    """

    is_list: ClassVar[bool]

    def scan(self, answer: Answer) -> Scan:
        return JsonScanner(answer.tokens.text, self.is_list).scan()

    def fault(self, scan: Scan, text: str, objects: Sequence[ParsedObject]) -> AnswerFault | None:
        if scan.open_at is None:
            return other_container(text)
        if scan.unpaired:
            return "wrong_container"
        behind = "" if scan.close_at is None else text[scan.close_at + 1 :]
        return "text_behind" if behind.strip(WHITE_SPACE) else None

    def judge(
        self, entry: Entry, key: str, index: int, answer: Answer, allow_poly: bool
    ) -> ParsedObject | DropReason:
        if not (entry.has_shape and entry.well_led):
            return "key_invalid"
        inside = answer.coords_between(entry.value_start, entry.end)
        fields = _read_fields(entry, inside, answer)
        if fields is None:
            return "key_invalid"
        reason = _check_fields(fields)
        if reason is not None:
            return reason
        parsed = _build_object(entry, key, index, fields, inside, answer)
        if not _are_tokens(fields[parsed.kind], parsed.coords):
            return "non_coord_token"
        return shape_fault(parsed.kind, parsed.coords, allow_poly) or parsed

    def misaligns(self, entry: Entry, answer: Answer) -> bool:
        inside = answer.coords_between(entry.value_start, entry.end)
        fields = _read_fields(entry, inside, answer) or {}
        lists = (value for value in fields.values() if isinstance(value, list))
        return any(all(_SPELLED.fullmatch(str(each)) for each in values) for values in lists)


def other_container(text: str) -> AnswerFault | None:
    """Return why a text has no entries of a format in JSON; None for text without a bracket."""
    return "wrong_container" if _NO_CONTAINER.match(text) else lead_in(text)


def _read_fields(entry: Entry, inside: range, answer: Answer) -> dict[str, Any] | None:
    """Return the fields of the object; None if it is no JSON, or keys repeat or nest."""
    if entry.nested:
        return None
    # A bare coordinate becomes a number, so that it is no description.
    bins, bare = answer.vocab.bins, _bare_coords(entry, inside, answer)
    numbers = {token: f" {bins[answer.ids[token]]} " for token in bare}
    try:
        pairs = _DECODER.decode(answer.exact_text(entry.value_start, entry.end + 1, numbers))
    except ValueError:
        return None
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else None


def _bare_coords(entry: Entry, inside: range, answer: Answer) -> list[int]:
    """Return the coordinate tokens of the value that are outside of its strings."""
    bare = []
    for i in inside:
        start = answer.coord_starts[i]
        before = bisect_left(entry.strings, (start, start))
        if not before or entry.strings[before - 1][1] <= start:
            bare.append(answer.coords[i])
    return bare


def _check_fields(fields: dict[str, Any]) -> DropReason | None:
    """Check keys, description and the kind of geometry, in the order of PARSE-04."""
    others = [key for key in fields if key != "desc"]
    # A single unknown list is in the place of the geometry; any other key is too much.
    unknown = [
        key for key in others if key not in GEOMETRY_KEYS and not isinstance(fields[key], list)
    ]
    if len(others) > 1 or unknown:
        return "key_invalid"
    desc = fields.get("desc")
    if not isinstance(desc, str) or not desc.strip() or _SURROGATE.search(desc):
        return "missing_desc"
    if not others:
        return "missing_geom"
    return None if others[0] in GEOMETRY_KEYS else "unknown_geom"


def _build_object(
    entry: Entry, key: str, index: int, fields: dict[str, Any], inside: range, answer: Answer
) -> ParsedObject:
    """Return the object with all its positions; its coordinates are checked later.

    The value is flat here: its strings are the two keys, the description and quoted coordinates. So
    the description is the second string, or the last one if the geometry is first.
    """
    first_key, second_key = fields
    opening, closing = entry.strings[1 if first_key == "desc" else -1]
    described = answer.coords_between(opening, closing)
    positions = (
        answer.coords[inside.start : described.start] + answer.coords[described.stop : inside.stop]
    )
    bins = answer.vocab.bins
    tokens = answer.tokens
    return ParsedObject(
        key=key,
        index=index,
        kind=cast(GeometryKind, second_key if first_key == "desc" else first_key),
        coords=[bins[answer.ids[token]] for token in positions],
        desc=fields["desc"],
        coord_token_indices=positions,
        token_span=(tokens.token_at(entry.start), tokens.token_at(entry.end) + 1),
        desc_token_indices=tokens.tokens_between(opening + 1, closing - 1),
    )


def _are_tokens(values: Any, bins: Sequence[int]) -> bool:
    """Return whether the value of a geometry is an array of coordinate tokens of these bins.

    Text with the characters of a coordinate token, or a plain number, has no bin.
    """
    if not isinstance(values, list) or len(values) != len(bins):
        return False
    return all(value in _SPELLINGS[k] for k, value in zip(bins, values, strict=True))


def object_text(
    item: GroundTruthObject, field_order: FieldOrder, separators: tuple[str, str]
) -> str:
    """Return the object in JSON. separators: between fields and items, and behind a key."""
    fields = {
        "desc": item.desc,
        item.shape.kind: [coord_token(k) for k in item.shape.coords],
    }
    if field_order == "geometry_first":
        fields = dict(reversed(fields.items()))
    return json.dumps(fields, ensure_ascii=False, separators=separators)
