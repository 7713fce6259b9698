"""Today's answer format: one JSON object of objects, coordinates as tokens of the vocabulary.

    {"object_1": {"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", ...]}, ...}<|im_end|>

    CoordJson    the format, as `learner.stages.formats` describes it
    parse        strict: which objects an answer holds, and where it can be cut (PARSE-01 to 07)
    write        the one serializer of both channels (APPEND-01)

The parser makes one pass over the ids: each is decoded alone, the scanner reads the text, and
every entry of the outermost object is assessed by itself. A coordinate is known by its id, never
by its text. Nothing is repaired. An entry that breaks a rule is dropped with the first reason
that applies (PARSE-04), the others stay.

    ids      {" object _1 ": {" desc ": " cat ", ... ]}}          }} is one token
    cut                                              ^ after the first } of it
    prefix   the ids before that token, and the ids of ]}

Same ids, same result; no ids raise; time is linear in the number of ids (PARSE-07).

Three decisions where the rules leave room:

- The token of an image or a video (`<|image_pad|>`) ends an answer as the end marker does: it is
  no text, and in the prefix the model would look for pixels behind it.
- A key of more than 640 digits is no `object_n`; one of 640 digits is, and does not count for
  the largest n, so that the key after any number that counts can be read back (APPEND-02).
- Brackets more than `MAX_BRACKETS` deep in an object count as nested keys (`key_invalid`).
"""

import json
import operator
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, SupportsIndex, cast

from learner.stages.coords import COORD_BINS, coord_token
from learner.stages.formats import ReadBack
from learner.stages.formats.json_scanner import WHITE_SPACE, Entry, Scanner
from learner.stages.tokens import (
    HALF_CHARACTER,
    IM_END,
    CoordVocab,
    Edit,
    Tokenizer,
    TokenText,
    decode_exactly,
    spell_leading,
    token_table,
)
from learner.types import (
    DropReason,
    FieldOrder,
    GeometryKind,
    GroundTruthObject,
    ParsedObject,
    ParsedRollout,
)
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import OBJECT_KEY_CONTEXTS

GEOMETRY_KEYS = ("bbox_2d", "poly")

# Python turns this many digits into a number and back whatever its settings.
MAX_DIGITS = 640

_OBJECT_KEY = re.compile(rf"object_([0-9]{{1,{MAX_DIGITS}}})")
_SURROGATE = re.compile("[\ud800-\udfff]")
_COUNTED_KEY = re.compile(rf'"object_([0-9]{{1,{MAX_DIGITS - 1}}})"[{WHITE_SPACE}]*:')

# How each bin may be written in an array: quoted, or bare and read as a number.
_SPELLINGS = [(coord_token(k), k) for k in range(COORD_BINS)]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Strict JSON: no NaN, no Infinity; an object reads as the list of its pairs.
_DECODER = json.JSONDecoder(
    object_pairs_hook=list, parse_constant=_refuse_constant, parse_int=float
)


# ---- parsing -------------------------------------------------------------------------


class _Answer(NamedTuple):
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


def parse_rollout(
    token_ids: Iterable[SupportsIndex],
    tokenizer: Tokenizer,
    *,
    allow_poly: bool = True,
    end_marker: str = IM_END,
) -> ParsedRollout:
    """Parse `response_token_ids` strictly.

    token_ids: a list, or an array or a tensor of whole numbers.
    allow_poly: false in the two-channel variant, where polygons are dropped.

    Raises `ContractError` only for a tokenizer without coordinate tokens.
    """
    answer = _read_answer(token_ids, tokenizer, end_marker)
    return _assess(Scanner(answer.tokens.text).scan(), answer, allow_poly)


def _assess(scan: Scanner, answer: _Answer, allow_poly: bool) -> ParsedRollout:
    """What a scanned answer holds."""
    cut = _cut(scan, answer)
    if cut is None:
        return _invalid_rollout(answer.tokenizer)
    end, prefix_ids = cut

    objects: list[ParsedObject] = []
    dropped: list[tuple[str, str]] = []
    entry_ends: list[tuple[int, int | None]] = []
    seen: set[str] = set()
    for entry in scan.entries:
        found = _read_entry(entry, answer, seen, allow_poly)
        kept = entry.end <= end
        if isinstance(found, ParsedObject) and kept:
            entry_ends.append((found.token_span[1] - 1, len(objects)))
            objects.append(found)
            continue
        dropped.append((entry.key, "key_invalid" if isinstance(found, ParsedObject) else found))
        if kept:
            entry_ends.append((answer.tokens.token_at(entry.end), None))
    if scan.unfinished_key is not None:
        dropped.append((scan.unfinished_key, "key_invalid"))

    return ParsedRollout(
        objects=objects,
        dropped=dropped,
        prefix_token_ids=prefix_ids,
        max_object_index=_max_object_index(answer.tokens.text[: end + 1], scan.entries),
        truncated=scan.close_at is None,
        invalid_rollout=False,
        entry_ends=entry_ends,
    )


def _read_answer(
    token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer, end_marker: str
) -> _Answer:
    table = token_table(tokenizer, end_marker)
    ids = list(map(operator.index, token_ids))
    ends = table.vocab.end_ids.intersection(ids)
    ids = ids[: min(map(ids.index, ends), default=len(ids))]
    tokens = TokenText(table.pieces(ids, tokenizer))
    coords = table.vocab.coords_of(ids)
    starts = [tokens.start_of(position) for position in coords]
    return _Answer(ids, tokens, coords, starts, table.vocab, tokenizer)


def _invalid_rollout(tokenizer: Tokenizer) -> ParsedRollout:
    """Nothing of the response can be kept; the sample trains on all its ground truth."""
    return ParsedRollout(
        objects=[],
        dropped=[],
        prefix_token_ids=tokenizer.encode("{", add_special_tokens=False),
        max_object_index=0,
        truncated=False,
        invalid_rollout=True,
        entry_ends=[],
    )


def _max_object_index(prefix_text: str, entries: list[Entry]) -> int:
    """Of all keys, and of what an entry without a colon has for a key: its name is taken, too."""
    numbers = [key[1] for key in _COUNTED_KEY.finditer(prefix_text)]
    names = [_OBJECT_KEY.fullmatch(e.key) for e in entries if e.end < len(prefix_text)]
    numbers += [name[1] for name in names if name is not None and len(name[1]) < MAX_DIGITS]
    return max(map(int, numbers), default=0)


# ---- the cut -------------------------------------------------------------------------


def _cut(scan: Scanner, answer: _Answer) -> tuple[int, list[int]] | None:
    """Place of the last character to keep, and the ids up to it; None for no such place.

    The end of the last object, else the first `{` (PARSE-05). A place inside a token
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


def _removals(scan: Scanner, prefix: ParsedRollout, kept: Collection[int]) -> list[Edit]:
    """What leaves only some entries of a prefix, the valid ones behind a gap numbered anew."""
    edits: list[Edit] = []
    largest = 0  # number of the entries kept so far
    gap: int | None = None  # where the text of entries begins that are not kept
    begin = 0
    for place, (entry, (_, index)) in enumerate(zip(scan.entries, prefix.entry_ends, strict=True)):
        if place not in kept:
            gap = begin if gap is None else gap
        else:
            if gap is not None:
                edits.append(Edit(gap, begin, ""))
                gap = None
            key = _OBJECT_KEY.fullmatch(entry.key)
            if key is not None:
                number = int(key[1])
                if edits and index is not None:
                    number = largest + 1
                    name = entry.start + 1
                    edits.append(Edit(name, name + len(entry.key), object_key(number)))
                largest = max(largest, number)
        begin = entry.end + 1
    return edits if gap is None else [*edits, Edit(gap, begin, "")]


def _leading_ids(token: int, place: int, answer: _Answer) -> list[int] | None:
    """Ids for what a token holds up to `place`; None if none spell it."""
    leading = answer.tokens.text[answer.tokens.start_of(token) : place + 1]
    if leading == answer.tokens.pieces[token]:
        return [answer.ids[token]]
    return spell_leading(answer.tokenizer, answer.ids[token], leading)


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
    inside = _coords_between(entry.value_start, entry.end, answer)
    fields = _read_fields(entry, inside, answer)
    if fields is None:
        return "key_invalid"
    reason = _check_fields(fields)
    if reason is not None:
        return reason
    parsed = _build_object(entry, int(key[1]), fields, inside, answer)
    return _check_coords(parsed, fields[parsed.kind], allow_poly) or parsed


def _coords_between(start: int, end: int, answer: _Answer) -> range:
    """Indices into `answer.coords` of those that begin in [start, end)."""
    starts = answer.coord_starts
    return range(bisect_left(starts, start), bisect_left(starts, end))


def _read_fields(entry: Entry, inside: range, answer: _Answer) -> dict[str, Any] | None:
    """Fields of the object; None if it is no JSON, or keys repeat or nest."""
    if entry.nested:
        return None
    try:
        pairs = _DECODER.decode(_value_text(entry, inside, answer))
    except ValueError:
        return None
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else None


def _value_text(entry: Entry, inside: range, answer: _Answer) -> str:
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


def _bare_coords(entry: Entry, inside: range, answer: _Answer) -> list[int]:
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


def _join_half_characters(answer: _Answer, first: int, last: int) -> list[str]:
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
    entry: Entry, index: int, fields: dict[str, Any], inside: range, answer: _Answer
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
        key=entry.key,
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


def object_key(index: int) -> str:
    """Key of the object with number `index`."""
    return f"object_{index}"


def serialize_objects(objects: Sequence[GroundTruthObject], field_order: FieldOrder) -> str:
    """A whole answer, `{...}`, with keys from `object_1` on."""
    return "{" + serialize_append("{", objects, 1, field_order)


def serialize_append(
    prefix_text: str,
    objects: Sequence[GroundTruthObject],
    start_index: int,
    field_order: FieldOrder,
) -> str:
    """Text that continues `prefix_text` with `objects` and closes the answer.

    prefix_text: ends (white space aside) in `}`, `{` or `,`; anything else cannot be
        continued and raises `ContractError`, as does a comma with nothing to follow it.
    start_index: number of the first appended object.
    """
    last = prefix_text.rstrip(WHITE_SPACE)[-1:]
    if last not in ("}", "{", ",") or (last == "," and not objects):
        raise ContractError(
            "serialize_append.prefix_text",
            f"it ends in {prefix_text[-20:]!r} and {len(objects)} objects are to follow",
            "Cut it after the `}` of an entry or after the opening `{`",
        )
    entries = ", ".join(
        _entry(start_index + i, item, field_order) for i, item in enumerate(objects)
    )
    separator = ", " if last == "}" and objects else ""
    return separator + entries + "}"


def _entry(index: int, item: GroundTruthObject, field_order: FieldOrder) -> str:
    fields = {
        "desc": item.desc,
        item.shape.kind: [coord_token(k) for k in item.shape.coords],
    }
    if field_order == "geometry_first":
        fields = dict(reversed(fields.items()))
    return f'"{object_key(index)}": {json.dumps(fields, ensure_ascii=False)}'


# ---- the format ----------------------------------------------------------------------


class CoordJson:
    """The format; a subclass may end its answers otherwise."""

    end_marker = IM_END
    entry_contexts = OBJECT_KEY_CONTEXTS

    def parse(
        self,
        token_ids: Iterable[SupportsIndex],
        tokenizer: Tokenizer,
        *,
        allow_poly: bool = True,
    ) -> ParsedRollout:
        return parse_rollout(
            token_ids, tokenizer, allow_poly=allow_poly, end_marker=self.end_marker
        )

    def read_back(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> ReadBack | None:
        answer = _read_answer(token_ids, tokenizer, self.end_marker)
        tokens, eos = answer.tokens, len(answer.ids)
        scan = Scanner(tokens.text).scan()
        if scan.close_at is None or list(token_ids[eos : eos + 1]) != [answer.vocab.end_id]:
            return None
        spans = []
        start = 0
        for entry in scan.entries:
            end = tokens.token_at(entry.end) + 1
            spans.append((start, end))
            start = end if tokens.start_of(end) == entry.end + 1 else end - 1
        closure = (tokens.token_at(scan.close_at), eos)
        return ReadBack(_assess(scan, answer, allow_poly=True), spans, closure)

    def keep(self, parsed: ParsedRollout, tokenizer: Tokenizer, kept: Collection[int]) -> list[int]:
        answer = _read_answer(parsed.prefix_token_ids, tokenizer, self.end_marker)
        edits = _removals(Scanner(answer.tokens.text).scan(), parsed, kept)
        return answer.tokens.edited(answer.ids, edits, tokenizer)

    def key(self, index: int) -> str:
        return object_key(index)

    def write(self, objects: Sequence[GroundTruthObject], field_order: FieldOrder) -> str:
        return serialize_objects(objects, field_order)

    def append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        start_index: int,
        field_order: FieldOrder,
    ) -> str:
        return serialize_append(prefix_text, objects, start_index, field_order)


COORD_JSON = CoordJson()
