"""What answer formats in JSON share: finding, judging and writing an object.

{"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}

An answer is one JSON object, `{"object_1": {...}, "object_2": {...}}`, or the list in one,
`{"objects": [{...}, {...}]}`. `JsonScanner` reads its text once, from lexeme to lexeme: a string, a
brace, a bracket, a comma, a colon, or a run of other characters.

    {"object_1": {"desc": "cat", ...}, "object_2": {...}}
    ^            ^                  ^                   ^
    open_at      value_start        end          close_at

An entry begins behind the entry before it, and ends with the last character of its own value. So
the comma, the key and any garbage between two values belong to the later entry.

    {"objects": [{"desc": "cat", ...}, {...}]}
                ^^                   ^       ^
          open_at value_start        end     close_at

The entries of a list have no key, and begin with their value. Other text than the outermost brace
behind the list, or a brace in the place of its closing bracket, is `unpaired` and an unfinished
entry. The scanner stops there.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, ClassVar, cast

from learner.stages.formats import (
    NOWHERE,
    WHITE_SPACE,
    Answer,
    AnswerFormat,
    Entry,
    Scan,
    lead_in,
    shape_fault,
)
from learner.stages.tokens import COORD_BINS, coord_token
from learner.types import (
    AnswerFault,
    DropReason,
    FieldOrder,
    GeometryKind,
    GroundTruthObject,
    ParsedObject,
)

GEOMETRY_KEYS = ("bbox_2d", "poly")

# An object holds one array; far more brackets than that need not be read.
MAX_BRACKETS = 16
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

# All repeats are possessive, so no lexeme is read twice. Group 1 is the closing quote: a
# string without an end reaches to the end of the text, or to a last backslash.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+(")?'
_WS = f"[{WHITE_SPACE}]*+"
_FIRST_BRACE = re.compile(rf"{_WS}\{{")
_LIST_HEAD = re.compile(rf'{_WS}\{{{_WS}"objects"{_WS}:{_WS}\[')
_LIST_END = re.compile(rf"\]{_WS}(?:(\}})|(.))?", re.DOTALL)
_BETWEEN_OBJECTS = re.compile(rf'{_STRING}|[{{}}\[\],:]|[^"{{}}\[\],:{WHITE_SPACE}]++', re.DOTALL)
_IN_OBJECT = re.compile(rf"{_STRING}|[{{}}\[\]]", re.DOTALL)


class JsonFormat(AnswerFormat):
    """is_list: as in `JsonScanner`."""

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


class _Next(Enum):
    """What the outermost object or list expects next."""

    COMMA = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    REST_OF_VALUE = auto()


class JsonScanner:
    """Finds the entries of an answer.

    is_list: the entries are the items of `{"objects": [...]}`, not the values of an object.
    """

    def __init__(self, text: str, is_list: bool) -> None:
        self._text = text
        self._is_list = is_list
        self._first = _Next.VALUE if is_list else _Next.KEY
        self._found = Scan()
        self._brackets = 0  # open ones between objects
        self._next = self._first
        self._draft = Entry()
        self._stopped = False

    def scan(self) -> Scan:
        """Return the entries; `open_at` is None if the answer does not begin like one."""
        opening = (_LIST_HEAD if self._is_list else _FIRST_BRACE).match(self._text)
        if opening is None:
            return self._found
        position = opening.end()
        self._found.open_at = position - 1
        while not self._stopped and (lexeme := _BETWEEN_OBJECTS.search(self._text, position)):
            position = self._read_between_objects(lexeme)
        if self._draft.start != NOWHERE:
            self._found.unfinished = self._draft
        return self._found

    def _read_between_objects(self, lexeme: re.Match[str]) -> int:
        """Read one lexeme, or a whole object; return the place of the next one."""
        start, end = lexeme.span()
        char = self._text[start]
        if char == '"':
            if lexeme[1] is None:
                return len(self._text)
            if self._brackets == 0:
                self._end_outer_string(start, end)
        elif char == "{":
            return self._read_object(start)
        elif char == "}" or (char == "]" and self._is_list and self._brackets == 0):
            self._close(char, start)
        elif char == "," and self._brackets == 0:
            self._read_comma()
        elif char == ":" and self._next is _Next.COLON:
            self._draft.end = start
            self._next = _Next.VALUE
        else:
            if char in "[]":
                self._found.unpaired |= char == "]" and self._brackets == 0
                self._brackets = max(self._brackets + (1 if char == "[" else -1), 0)
            self._take_plain_value(start, end)
        return end

    def _close(self, char: str, place: int) -> None:
        """Stop at a brace or bracket that closes the answer, or is in the place of one."""
        self._stopped = True
        ending = _LIST_END.match(self._text, place)  # of a bracket
        if not self._is_list:
            self._found.close_at = place
        elif ending is not None and ending[1]:
            self._found.close_at = ending.start(1)
        elif ending is None or ending[2]:
            self._found.unpaired = True
            self._draft.start = place

    def _read_object(self, start: int) -> int:
        """Read an object, of an entry or inside of brackets; return the place after it."""
        draft = self._draft
        self._found.unpaired |= self._brackets > 0
        if self._brackets == 0:
            draft.well_led &= self._next is _Next.VALUE
            draft.value_start = start
            if draft.start == NOWHERE:
                draft.start = start
        depth = 1
        brackets = 0
        for lexeme in _IN_OBJECT.finditer(self._text, start + 1):
            if lexeme.lastindex:
                draft.strings.append(lexeme.span())
                continue
            char = lexeme[0]
            if char == "[":
                brackets += 1
                draft.nested |= brackets > MAX_BRACKETS
            elif char == "]":
                brackets -= 1
            elif char == "{":
                depth += 1
                draft.nested = True
            elif char == "}":
                depth -= 1
                if depth == 0:
                    return self._close_object(lexeme.start())
            else:  # a string without an end
                break
        return len(self._text)

    def _close_object(self, end: int) -> int:
        if self._brackets == 0:
            self._draft.has_shape = True
            self._end_entry(end)
            self._next = _Next.COMMA
        return end + 1

    def _end_outer_string(self, start: int, end: int) -> None:
        """Take a string between objects: a key, or a value that is no object."""
        if self._is_list or self._next in (_Next.VALUE, _Next.REST_OF_VALUE):
            self._take_plain_value(start, end)
            return
        self._draft.well_led &= self._next is _Next.KEY
        self._draft.key = self._text[start + 1 : end - 1]
        self._draft.start = start
        self._draft.end = end - 1
        self._next = _Next.COLON

    def _take_plain_value(self, start: int, end: int) -> None:
        """Take a part of a value that is no object, or garbage in the place of a value."""
        if self._next is _Next.VALUE and self._draft.start == NOWHERE:
            self._draft.start = start
        self._draft.end = end - 1
        if self._next in (_Next.VALUE, _Next.REST_OF_VALUE):
            self._next = _Next.REST_OF_VALUE
        else:
            self._draft.well_led = False

    def _read_comma(self) -> None:
        if self._draft.start != NOWHERE:
            self._end_entry(self._draft.end)
        elif self._next is not _Next.COMMA:
            self._draft.well_led = False
        self._next = self._first

    def _end_entry(self, end: int) -> None:
        self._draft.end = end
        self._found.entries.append(self._draft)
        self._draft = Entry()


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
