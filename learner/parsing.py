"""Strict parser of a rollout: which objects it holds, and where it can be cut.

One pass over the response ids (PARSE-01): each id is decoded alone, `learner.scanner`
follows the characters, and every entry of the outermost object is judged by itself.
Nothing is repaired. An entry that breaks a rule is dropped with the first reason that
applies (PARSE-04), the others stay.

    ids      {" object _1 ": {" desc ": " cat ", ... ]}}          }} is one token
    cut                                              ^ after the first } of it
    prefix   the ids before that token, and the ids of ]}

Same ids, same result; no ids raise; time is linear in the number of ids (PARSE-07).
"""

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, cast

from learner.coords import coord_token
from learner.scanner import WHITE_SPACE, Entry, Scanner, Spot, text_between
from learner.tokens import (
    HALF_CHARACTER,
    CoordVocab,
    Tokenizer,
    decode_exactly,
    token_table,
)
from learner.types import GeometryKind, ParsedObject, ParsedRollout

DropReason = Literal[
    "key_invalid",
    "missing_desc",
    "missing_geom",
    "unknown_geom",
    "non_coord_token",
    "wrong_arity",
    "bbox_invalid",
    "poly_unsupported",
]

GEOMETRY_KEYS = ("bbox_2d", "poly")

# More digits than any run can count to are no number of an object.
_OBJECT_KEY = re.compile(r"object_([0-9]{1,18})")
_SURROGATE = re.compile("[\ud800-\udfff]")
_OBJECT_KEY_IN_TEXT = re.compile(rf'"{_OBJECT_KEY.pattern}"[{WHITE_SPACE}]*:')


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Strict JSON: no NaN, no Infinity; an object reads as the list of its pairs.
_DECODER = json.JSONDecoder(
    object_pairs_hook=list, parse_constant=_refuse_constant, parse_int=float
)


class _Answer(NamedTuple):
    """A response up to `<|im_end|>`: its ids, the text of each, and the tokenizer."""

    ids: list[int]
    pieces: list[str]
    vocab: CoordVocab
    tokenizer: Tokenizer


def parse_rollout(
    token_ids: Sequence[int], tokenizer: Tokenizer, *, allow_poly: bool = True
) -> ParsedRollout:
    """Parse `response_token_ids` strictly.

    allow_poly: false in the two-channel variant, where polygons are dropped.

    Raises `ContractError` only for a tokenizer without coordinate tokens.
    """
    answer = _read_answer(token_ids, tokenizer)
    scan = scan_answer(answer.pieces, answer.ids, answer.vocab)
    cut = _cut(scan, answer)
    if cut is None:
        return _invalid_rollout(tokenizer)
    end, prefix_ids, prefix_text = cut

    objects: list[ParsedObject] = []
    dropped: list[tuple[str, str]] = []
    entry_ends: list[tuple[int, int | None]] = []
    seen: set[str] = set()
    for entry in scan.entries:
        found = _read_entry(entry, answer, seen, allow_poly)
        kept = entry.end <= end
        if isinstance(found, ParsedObject) and kept:
            entry_ends.append((entry.end.token, len(objects)))
            objects.append(found)
            continue
        dropped.append((entry.key, "key_invalid" if isinstance(found, ParsedObject) else found))
        if kept:
            entry_ends.append((entry.end.token, None))
    if scan.unfinished_key is not None:
        dropped.append((scan.unfinished_key, "key_invalid"))

    return ParsedRollout(
        objects=objects,
        dropped=dropped,
        prefix_token_ids=prefix_ids,
        max_object_index=_max_object_index(prefix_text),
        truncated=scan.close_at is None,
        invalid_rollout=False,
        entry_ends=entry_ends,
    )


def scan_answer(pieces: list[str], token_ids: list[int], vocab: CoordVocab) -> Scanner:
    """Run the scanner over the tokens of an answer."""
    is_coord = vocab.bins
    return Scanner(
        pieces, frozenset(i for i, token_id in enumerate(token_ids) if token_id in is_coord)
    ).scan()


def _read_answer(token_ids: Sequence[int], tokenizer: Tokenizer) -> _Answer:
    table = token_table(tokenizer)
    ids = list(token_ids)
    if table.vocab.im_end_id in ids:
        ids = ids[: ids.index(table.vocab.im_end_id)]
    return _Answer(ids, table.pieces(ids, tokenizer), table.vocab, tokenizer)


def _invalid_rollout(tokenizer: Tokenizer) -> ParsedRollout:
    """Nothing of the response can be kept; the sample trains on all its ground truth."""
    return ParsedRollout(
        objects=[],
        dropped=[],
        prefix_token_ids=tokenizer.encode("{", add_special_tokens=False),
        max_object_index=0,
        truncated=True,
        invalid_rollout=True,
        entry_ends=[],
    )


def _max_object_index(prefix_text: str) -> int:
    keys = _OBJECT_KEY_IN_TEXT.finditer(prefix_text)
    return max((int(key[1]) for key in keys), default=0)


# ---- the cut -------------------------------------------------------------------------


def _cut(scan: Scanner, answer: _Answer) -> tuple[Spot, list[int], str] | None:
    """Last character to keep, the ids up to it, and their text; None for no such place.

    The end of the last object, else the first `{` (PARSE-05). A place inside a token
    whose leading piece no ids spell exactly is passed over for the one before it.
    """
    if scan.open_at is None:
        return None
    ends = [entry.end for entry in scan.entries if entry.is_object]
    for spot in (*reversed(ends), scan.open_at):
        last_ids = _ids_up_to(spot, answer)
        if last_ids is not None:
            text = "".join(answer.pieces[: spot.token])
            leading = answer.pieces[spot.token][: spot.offset + 1]
            return spot, answer.ids[: spot.token] + last_ids, text + leading
    return None


def _ids_up_to(spot: Spot, answer: _Answer) -> list[int] | None:
    """Ids for the token of `spot`, cut after that character; None if none spell it."""
    piece = answer.pieces[spot.token]
    if spot.offset == len(piece) - 1:
        return [answer.ids[spot.token]]
    leading = piece[: spot.offset + 1]
    if HALF_CHARACTER in leading:
        return None
    ids = answer.tokenizer.encode(leading, add_special_tokens=False)
    pieces = token_table(answer.tokenizer).pieces(ids, answer.tokenizer)
    return ids if "".join(pieces) == leading else None


# ---- one entry -----------------------------------------------------------------------


def _read_entry(
    entry: Entry, answer: _Answer, seen: set[str], allow_poly: bool
) -> ParsedObject | DropReason:
    """Judge one entry; `seen` holds the keys before it and takes this one's."""
    key = _OBJECT_KEY.fullmatch(entry.key)
    repeated = entry.key in seen
    seen.add(entry.key)
    if key is None or repeated or not (entry.is_object and entry.well_led):
        return "key_invalid"
    fields = _read_fields(entry, answer)
    if fields is None:
        return "key_invalid"
    reason = _check_fields(fields)
    if reason is not None:
        return reason
    parsed = _build_object(entry, int(key[1]), fields, answer)
    return _check_coords(parsed, fields[parsed.kind], allow_poly) or parsed


def _read_fields(entry: Entry, answer: _Answer) -> dict[str, Any] | None:
    """Fields of the object; None if it is no JSON, or keys repeat or nest."""
    if entry.nested:
        return None
    try:
        pairs: list[tuple[str, Any]] = _DECODER.decode(_value_text(entry, answer))
    except ValueError:
        return None
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else None


def _value_text(entry: Entry, answer: _Answer) -> str:
    """Exact text of the value, each bare coordinate token written as a JSON number.

    As a number it can be a coordinate, and cannot pass for a description.
    """
    first, last = entry.value_start.token, entry.end.token
    pieces = _join_half_characters(answer, first, last)
    for token in entry.bare_coords:
        pieces[token - first] = f" {answer.vocab.bins[answer.ids[token]]} "
    text = "".join(pieces)
    # Both braces are ASCII: what stands outside of them reads the same joined or alone.
    after = len(answer.pieces[last]) - 1 - entry.end.offset
    return text[entry.value_start.offset : len(text) - after]


def _join_half_characters(answer: _Answer, first: int, last: int) -> list[str]:
    """Text of the tokens first..last; tokens that share a character are decoded together."""
    pieces = answer.pieces[first : last + 1]
    if not any(HALF_CHARACTER in piece for piece in pieces):
        return pieces
    joined: list[str] = []
    position = first
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
    entry: Entry, index: int, fields: dict[str, Any], answer: _Answer
) -> ParsedObject:
    """The object with all its positions; its coordinates are not checked yet.

    The value is flat here: its strings are the two keys, the description and quoted
    coordinates, so the description is the second string, or the last one if it comes
    second.
    """
    keys = list(fields)
    opening, closing = entry.strings[1 if keys[0] == "desc" else -1]
    bins = answer.vocab.bins
    coord_indices = [
        token
        for token in range(entry.value_start.token, entry.end.token + 1)
        if answer.ids[token] in bins and not opening.token < token < closing.token
    ]
    return ParsedObject(
        key=entry.key,
        index=index,
        kind=cast(GeometryKind, keys[1] if keys[0] == "desc" else keys[0]),
        coords=[bins[answer.ids[token]] for token in coord_indices],
        desc=fields["desc"],
        coord_token_indices=coord_indices,
        token_span=(entry.start.token, entry.end.token + 1),
        desc_token_indices=_tokens_between(opening, closing, answer.pieces),
    )


def _tokens_between(opening: Spot, closing: Spot, pieces: list[str]) -> list[int]:
    """Tokens that hold a character between two quotes."""
    return [
        token
        for token in range(opening.token, closing.token + 1)
        if text_between(
            pieces,
            opening if token == opening.token else Spot(token, -1),
            closing if token == closing.token else Spot(token, len(pieces[token])),
        )
    ]


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
    return len(values) == len(bins) and all(
        value in (coord_token(k), k) for value, k in zip(values, bins, strict=True)
    )
