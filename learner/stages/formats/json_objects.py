"""Objects of an answer in JSON: what one holds, where it can be cut, and how it is written.

    {"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}

    read_answer    ids -> text, with the token of each character and the coordinate tokens
    cut            the last place at which the ids can be continued
    read_object    one entry of a scanner -> an object, or the first reason against it
    object_text    an annotated object as text

The formats whose answers are JSON share this; `json_scanner` finds the entries for them.
"""

import json
import operator
import re
from bisect import bisect_left
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple, SupportsIndex, cast

from learner.stages.coords import COORD_BINS, coord_token
from learner.stages.formats.json_scanner import Entry, Scanner
from learner.stages.tokens import (
    HALF_CHARACTER,
    CoordVocab,
    Tokenizer,
    TokenText,
    decode_exactly,
    spell_leading,
    token_table,
)
from learner.types import DropReason, FieldOrder, GeometryKind, GroundTruthObject, ParsedObject

GEOMETRY_KEYS = ("bbox_2d", "poly")

_SURROGATE = re.compile("[\ud800-\udfff]")

# How each bin may be written in an array: quoted, or bare and read as a number.
_SPELLINGS = [(coord_token(k), k) for k in range(COORD_BINS)]
_SPELLED = re.compile(r"<\|coord_[0-9]{1,3}\|>")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Strict JSON: no NaN, no Infinity; an object reads as the list of its pairs.
_DECODER = json.JSONDecoder(
    object_pairs_hook=list, parse_constant=_refuse_constant, parse_int=float
)


class Answer(NamedTuple):
    """A response up to where it ends.

    coords, coord_starts: position of each coordinate token in the ids, in order, and the
        place in the text where it begins.
    """

    ids: list[int]
    tokens: TokenText
    coords: list[int]
    coord_starts: list[int]
    vocab: CoordVocab
    tokenizer: Tokenizer

    def misaligns(self, entry: Entry) -> bool:
        """Whether an entry of `non_coord_token` spells coordinates, in ids not of their tokens."""
        inside = _coords_between(entry.value_start, entry.end, self)
        fields = _read_fields(entry, inside, self) or {}
        lists = (value for value in fields.values() if isinstance(value, list))
        return any(all(_SPELLED.fullmatch(str(each)) for each in values) for values in lists)


def read_answer(
    token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer, end_marker: str
) -> Answer:
    table = token_table(tokenizer, end_marker)
    ids = list(map(operator.index, token_ids))
    ends = table.vocab.end_ids.intersection(ids)
    ids = ids[: min(map(ids.index, ends), default=len(ids))]
    tokens = TokenText(table.pieces(ids, tokenizer))
    coords = table.vocab.coords_of(ids)
    starts = [tokens.start_of(position) for position in coords]
    return Answer(ids, tokens, coords, starts, table.vocab, tokenizer)


# ---- the cut -------------------------------------------------------------------------


def cut(scan: Scanner, answer: Answer) -> tuple[int, list[int]] | None:
    """Place of the last character to keep, and the ids up to it; None for no such place.

    The end of the last object, else `open_at` (PARSE-05). A place inside a token
    whose leading piece no ids spell exactly is passed over for the one before it.
    """
    if scan.open_at is None:
        return None
    ends = [entry.end for entry in scan.entries if entry.is_object]
    for place in (*reversed(ends), scan.open_at):
        token = answer.tokens.token_at(place)
        last_ids = _leading_ids(token, place, answer)
        if last_ids is not None:
            return place, answer.ids[:token] + last_ids
    return None


def _leading_ids(token: int, place: int, answer: Answer) -> list[int] | None:
    """Ids for what a token holds up to `place`; None if none spell it."""
    leading = answer.tokens.text[answer.tokens.start_of(token) : place + 1]
    if leading == answer.tokens.pieces[token]:
        return [answer.ids[token]]
    return spell_leading(answer.tokenizer, answer.ids[token], leading)


# ---- one object ----------------------------------------------------------------------


def read_object(
    entry: Entry, key: str, index: int, answer: Answer, allow_poly: bool
) -> ParsedObject | DropReason:
    """Judge the value of one entry, in the order of PARSE-04.

    key, index: what the object is called and numbered.
    """
    if not (entry.is_object and entry.well_led):
        return "key_invalid"
    inside = _coords_between(entry.value_start, entry.end, answer)
    fields = _read_fields(entry, inside, answer)
    if fields is None:
        return "key_invalid"
    reason = _check_fields(fields)
    if reason is not None:
        return reason
    parsed = _build_object(entry, key, index, fields, inside, answer)
    return _check_coords(parsed, fields[parsed.kind], allow_poly) or parsed


def _coords_between(start: int, end: int, answer: Answer) -> range:
    """Indices into `answer.coords` of those that begin in [start, end)."""
    starts = answer.coord_starts
    return range(bisect_left(starts, start), bisect_left(starts, end))


def _read_fields(entry: Entry, inside: range, answer: Answer) -> dict[str, Any] | None:
    """Fields of the object; None if it is no JSON, or keys repeat or nest."""
    if entry.nested:
        return None
    try:
        pairs = _DECODER.decode(_value_text(entry, inside, answer))
    except ValueError:
        return None
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else None


def _value_text(entry: Entry, inside: range, answer: Answer) -> str:
    """Exact text of the value, each bare coordinate token written as a JSON number.

    As a number it can be a coordinate, and cannot pass for a description.
    """
    text = answer.tokens.text[entry.value_start : entry.end + 1]
    bare = _bare_coords(entry, inside, answer)
    if not bare and HALF_CHARACTER not in text:
        return text
    first = answer.tokens.token_at(entry.value_start)
    last = answer.tokens.token_at(entry.end)
    pieces = _join_half_characters(answer, first, last)
    for token in bare:
        pieces[token - first] = f" {answer.vocab.bins[answer.ids[token]]} "
    text = "".join(pieces)
    # Both braces are ASCII: what stands outside of them reads the same joined or alone.
    before = entry.value_start - answer.tokens.start_of(first)
    after = answer.tokens.start_of(last + 1) - 1 - entry.end
    return text[before : len(text) - after]


def _bare_coords(entry: Entry, inside: range, answer: Answer) -> list[int]:
    """Coordinate tokens of the value that stand outside of its strings."""
    quoted = {opening + 1 for opening, _ in entry.strings}
    bare = []
    for i in inside:
        start = answer.coord_starts[i]
        if start in quoted:
            continue
        before = bisect_left(entry.strings, (start, start))
        if not before or entry.strings[before - 1][1] <= start:
            bare.append(answer.coords[i])
    return bare


def _join_half_characters(answer: Answer, first: int, last: int) -> list[str]:
    """Text of the tokens first..last; tokens that share a character are decoded together."""
    joined: list[str] = []
    position = first
    pieces = answer.tokens.pieces[first : last + 1]
    for half, group in groupby(pieces, lambda piece: HALF_CHARACTER in piece):
        run = list(group)
        if half:
            ids = answer.ids[position : position + len(run)]
            joined += [decode_exactly(answer.tokenizer, ids)] + [""] * (len(run) - 1)
        else:
            joined += run
        position += len(run)
    return joined


def _check_fields(fields: dict[str, Any]) -> DropReason | None:
    """Rules about keys, description and the kind of geometry, in the order of PARSE-04."""
    others = [key for key in fields if key != "desc"]
    # A single unknown list stands where the geometry should; any other key is extra.
    unknown = [
        key for key in others if key not in GEOMETRY_KEYS and not isinstance(fields[key], list)
    ]
    if len(others) > 1 or unknown:
        return "key_invalid"
    if not _is_description(fields.get("desc")):
        return "missing_desc"
    if not others:
        return "missing_geom"
    return None if others[0] in GEOMETRY_KEYS else "unknown_geom"


def _is_description(value: object) -> bool:
    """A string that is not blank, and that is text (no unpaired surrogates)."""
    if not isinstance(value, str) or not value.strip():
        return False
    return _SURROGATE.search(value) is None


def _build_object(
    entry: Entry, key: str, index: int, fields: dict[str, Any], inside: range, answer: Answer
) -> ParsedObject:
    """The object with all its positions; its coordinates are not checked yet.

    The value is flat here: its strings are the two keys, the description and quoted
    coordinates, so the description is the second string, or the last one if it comes
    second.
    """
    first_key, second_key = fields
    opening, closing = entry.strings[1 if first_key == "desc" else -1]
    described = _coords_between(opening, closing, answer)
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


def _check_coords(parsed: ParsedObject, values: Any, allow_poly: bool) -> DropReason | None:
    """Rules about the geometry's value, in the order of PARSE-04."""
    if not isinstance(values, list) or not _are_coord_tokens(values, parsed.coords):
        return "non_coord_token"
    if parsed.kind == "poly":
        if len(values) < 6 or len(values) % 2:
            return "wrong_arity"
        return None if allow_poly else "poly_unsupported"
    if len(values) != 4:
        return "wrong_arity"
    x1, y1, x2, y2 = parsed.coords
    return "bbox_invalid" if x2 < x1 or y2 < y1 else None


def _are_coord_tokens(values: list[Any], bins: list[int]) -> bool:
    """True if each value is exactly one coordinate token, quoted or bare.

    `bins` come from the ids of the coordinate tokens: text that merely looks like one,
    or a number that was written out, has no bin and makes the lengths differ.
    """
    spellings = map(_SPELLINGS.__getitem__, bins)
    return len(values) == len(bins) and all(map(operator.contains, spellings, values))


# ---- writing -------------------------------------------------------------------------


def object_text(
    item: GroundTruthObject, field_order: FieldOrder, separators: tuple[str, str]
) -> str:
    """The object in JSON. separators: between fields and items, and behind a key."""
    fields = {
        "desc": item.desc,
        item.shape.kind: [coord_token(k) for k in item.shape.coords],
    }
    if field_order == "geometry_first":
        fields = dict(reversed(fields.items()))
    return json.dumps(fields, ensure_ascii=False, separators=separators)
