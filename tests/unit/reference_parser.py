"""The strict parser written a second time, plainly and slowly, from the contract's words.

It walks over the bytes of an answer one by one and reads each value with `json`; it shares no
code with `learner.stages.formats.coord_json`. It is for answers whose outermost level is well
formed up to where they end (keys, colons, commas and values in turn); what the values hold may be
broken.
"""

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from learner.stages.tokens import COORD_BINS, IM_END, coord_token
from learner.types import ParsedObject

BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}
WHITE = " \t\n\r"
GEOMETRIES = ("bbox_2d", "poly")
ENDS = (IM_END, "<|image_pad|>", "<|video_pad|>")

# Stand-ins for coordinate tokens, one character each, and the mark of one without quotes.
FIRST_COORD = 0xE000
BARE = chr(0xF8FF)


class Answer(NamedTuple):
    """An answer as one character for each byte (its value) or coordinate token (a stand-in).

    owner: the token of each.
    """

    symbols: str
    owner: list[int]


class Found(NamedTuple):
    """A valid object; fields as in `ParsedObject`."""

    key: str
    kind: str
    coords: list[int]
    desc: str
    coord_token_indices: list[int]
    token_span: tuple[int, int]
    desc_token_indices: list[int]


def as_found(parsed: ParsedObject) -> Found:
    return Found(*(getattr(parsed, name) for name in Found._fields))


@dataclass
class Reading:
    """Result of the reference. prefix: the kept part in symbols; None if there is none."""

    prefix: str | None = None
    truncated: bool = False
    max_object_index: int = 0
    objects: list[Found] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    entry_ends: list[tuple[int, int | None]] = field(default_factory=list)


def read_symbols(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> Answer:
    """The bytes of an answer up to where it ends, from the names of its tokens."""
    added = tokenizer.added_tokens_decoder
    coords = {coord_token(k): chr(FIRST_COORD + k) for k in range(COORD_BINS)}
    symbols: list[str] = []
    owner: list[int] = []
    for position, name in enumerate(tokenizer.convert_ids_to_tokens(ids)):
        if name in ENDS:
            break
        if name in coords:
            text = coords[name]
        elif ids[position] in added:
            text = name.encode().decode("latin-1")
        else:
            text = "".join(chr(BYTE_OF[char]) for char in name)
        symbols += text
        owner += [position] * len(text)
    return Answer("".join(symbols), owner)


def parse_slowly(
    ids: list[int], tokenizer: PreTrainedTokenizerFast, *, allow_poly: bool = True
) -> Reading:
    answer = read_symbols(ids, tokenizer)
    symbols = answer.symbols
    reading = Reading()
    opening = len(symbols) - len(symbols.lstrip(WHITE))
    if symbols[opening : opening + 1] != "{":
        return reading
    entries, last, closed = split_entries(symbols, opening + 1)
    ends = [end for _, end, is_object in entries if is_object]
    cut = ends[-1] if ends else opening + 1
    reading.prefix = symbols[:cut]
    reading.truncated = not closed
    reading.max_object_index = largest_number(reading.prefix)
    seen: set[str] = set()
    for start, end, is_object in entries:
        key, value_start = read_key(symbols, start)
        found: Found | str = "key_invalid"
        if is_object and key not in seen and is_object_key(key):
            begin = symbols.rindex(f'"{key}"', 0, value_start)
            found = read_object(answer, key, begin, value_start, end, allow_poly)
        seen.add(key)
        if isinstance(found, str):
            reading.dropped.append((key, found))
        if end <= cut:
            position = None if isinstance(found, str) else len(reading.objects)
            reading.entry_ends.append((answer.owner[end - 1], position))
        if isinstance(found, Found):
            reading.objects.append(found)
    if symbols[last:].count('"') > 1:
        reading.dropped.append((read_key(symbols, last)[0], "key_invalid"))
    return reading


def split_entries(symbols: str, start: int) -> tuple[list[tuple[int, int, bool]], int, bool]:
    """(start, end, whether it is an object) of each entry; the rest's start; closed or not."""
    entries: list[tuple[int, int, bool]] = []
    braces, brackets = 1, 0
    in_string = escaped = False
    for at in range(start, len(symbols)):
        char = symbols[at]
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{}":
            braces += 1 if char == "{" else -1
            if braces == 0:
                return entries, start, True
            if braces == 1 and char == "}" and brackets == 0:
                entries.append((start, at + 1, True))
                start = at + 1
        elif braces == 1 and char in "[]":
            brackets += 1 if char == "[" else -1
        elif braces == 1 and brackets == 0 and char == ",":
            if symbols[start:at].strip(WHITE):
                entries.append((start, start + len(symbols[start:at].rstrip(WHITE)), False))
            start = at + 1
    return entries, start, False


def read_key(symbols: str, start: int) -> tuple[str, int]:
    """Key of an entry, and where its value begins."""
    opening = symbols.index('"', start)
    closing = symbols.index('"', opening + 1)
    value_start = closing + 1
    while symbols[value_start : value_start + 1] and symbols[value_start] in WHITE + ":":
        value_start += 1
    return symbols[opening + 1 : closing], value_start


def is_object_key(key: str) -> bool:
    return key.startswith("object_") and key[7:].isdecimal() and key.isascii()


def largest_number(prefix: str) -> int:
    largest = 0
    for start, end in strings_in(prefix, 0, len(prefix)):
        name = prefix[start:end]
        if is_object_key(name) and prefix[end + 1 :].lstrip(WHITE).startswith(":"):
            largest = max(largest, int(name[7:]))
    return largest


def strings_in(symbols: str, start: int, end: int) -> list[tuple[int, int]]:
    """[start, end) of what each string holds."""
    strings = []
    at = start
    while at < end:
        if symbols[at] == '"':
            opening = at + 1
            at = opening
            while at < end and symbols[at] != '"':
                at += 2 if symbols[at] == "\\" else 1
            strings.append((opening, at))
        at += 1
    return strings


def read_object(
    answer: Answer, key: str, begin: int, start: int, end: int, allow_poly: bool
) -> Found | str:
    """The object of an entry that begins with `begin`, or why it is dropped (PARSE-04)."""
    strings = strings_in(answer.symbols, start, end)
    value = as_json(answer.symbols, start, end, strings)
    if not isinstance(value, Pairs):
        return "key_invalid"
    fields = dict(value)
    if len(fields) < len(value) or any(holds_object(item) for item in fields.values()):
        return "key_invalid"
    others = [name for name in fields if name != "desc"]
    if len(others) > 1:
        return "key_invalid"
    if others and others[0] not in GEOMETRIES and not isinstance(fields[others[0]], list):
        return "key_invalid"
    if not is_description(fields.get("desc")):
        return "missing_desc"
    if not others:
        return "missing_geom"
    kind = others[0]
    if kind not in GEOMETRIES:
        return "unknown_geom"
    coords = as_coords(fields[kind])
    if coords is None:
        return "non_coord_token"
    reason = why_wrong(kind, coords, allow_poly)
    if reason is not None:
        return reason
    said = strings[1 if next(iter(fields)) == "desc" else -1]
    owner = answer.owner
    return Found(
        key=key,
        kind=kind,
        coords=coords,
        desc="".join(as_text(char) for char in fields["desc"]),
        coord_token_indices=[
            owner[at]
            for at in range(start, end)
            if ord(answer.symbols[at]) >= FIRST_COORD and not said[0] <= at < said[1]
        ],
        token_span=(owner[begin], owner[end - 1] + 1),
        desc_token_indices=sorted({owner[at] for at in range(*said)}),
    )


class Pairs(list[tuple[str, Any]]):
    """A JSON object, with keys that come twice."""


def as_json(symbols: str, start: int, end: int, strings: list[tuple[int, int]]) -> Any:
    """The value as `json` reads it, None where it does not."""
    quoted = {at for opening, closing in strings for at in range(opening, closing)}
    written = [
        f'"{BARE}{char}"' if ord(char) >= FIRST_COORD and at not in quoted else char
        for at, char in enumerate(symbols[start:end], start)
    ]
    text = b"".join(
        char.encode("latin-1") if ord(char) < 256 else char.encode() for char in "".join(written)
    ).decode(errors="replace")
    try:
        return json.loads(text, object_pairs_hook=Pairs, parse_int=float, parse_constant=refuse)
    except ValueError:
        return None


def refuse(name: str) -> None:
    raise ValueError(name)


def holds_object(value: Any) -> bool:
    return isinstance(value, Pairs) or (isinstance(value, list) and any(map(holds_object, value)))


def is_description(value: Any) -> bool:
    if not isinstance(value, str) or value.startswith(BARE) or not value.strip():
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)


def is_coord(char: str) -> bool:
    return FIRST_COORD <= ord(char) < FIRST_COORD + COORD_BINS


def as_text(char: str) -> str:
    return coord_token(ord(char) - FIRST_COORD) if is_coord(char) else char


def as_coords(values: Any) -> list[int] | None:
    """Bins of an array, None where an element is anything but one coordinate token."""
    if not isinstance(values, list):
        return None
    names = [value.removeprefix(BARE) if isinstance(value, str) else "" for value in values]
    if not all(len(name) == 1 and is_coord(name) for name in names):
        return None
    return [ord(name) - FIRST_COORD for name in names]


def why_wrong(kind: str, coords: list[int], allow_poly: bool) -> str | None:
    if kind == "poly":
        if len(coords) < 6 or len(coords) % 2:
            return "wrong_arity"
        return None if allow_poly else "poly_unsupported"
    if len(coords) != 4:
        return "wrong_arity"
    return "bbox_invalid" if coords[2] < coords[0] or coords[3] < coords[1] else None
