"""What answer formats in JSON share: reading and writing an object, and parsing an answer.

    {"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}

    JsonFormat     parse, read_back and keep; a format names its entries and its text
    read_object    one entry of a scanner -> an object, or the first reason against it
    object_text    an annotated object as text

`json_scanner` finds the entries.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar, SupportsIndex, cast

from learner.stages.coords import COORD_BINS, coord_token
from learner.stages.formats import ReadBack
from learner.stages.formats.answer_text import (
    Answer,
    entry_spans,
    lead_in,
    read_answer,
    removals,
)
from learner.stages.formats.json_scanner import Entry, Scanner
from learner.stages.tokens import Edit, Tokenizer
from learner.types import (
    AnswerFault,
    DropReason,
    FieldOrder,
    GeometryKind,
    GroundTruthObject,
    ParsedObject,
    ParsedRollout,
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


class JsonFormat:
    """The common part of the formats in JSON; a format is a subclass.

    scanner: finds the entries of an answer.
    opening: text of the prefix if nothing of an answer can be kept.
    """

    scanner: ClassVar[type[Scanner]]
    opening: ClassVar[str]

    def name(self, entry: Entry, number: int) -> tuple[str, int | None]:
        """Return the key of an entry as logs have it, and its index; None: a wrong key.

        number: of the entry, from 1.
        """
        raise NotImplementedError

    def largest_index(self, prefix_text: str, entries: Sequence[Entry]) -> int:
        """Return the largest index in a prefix, which its entries and others have taken."""
        raise NotImplementedError

    def fault(self, scan: Scanner, text: str) -> AnswerFault | None:
        """Return why `text` was not read as this format, or not to its end."""
        if scan.open_at is None:
            return other_container(text)
        if scan.unpaired:
            return "wrong_container"
        return "text_behind" if scan.text_behind else None

    def removals(self, scan: Scanner, prefix: ParsedRollout, kept: Collection[int]) -> list[Edit]:
        """Return the edits that leave only some entries of a prefix."""
        return removals([(entry.start, entry.end + 1) for entry in scan.entries], kept)

    def parse(
        self, token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer, *, allow_poly: bool = True
    ) -> ParsedRollout:
        answer = read_answer(token_ids, tokenizer)
        return self.assess(self.scanner(answer.tokens.text).scan(), answer, allow_poly)

    def read_back(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> ReadBack | None:
        answer = read_answer(token_ids, tokenizer)
        scan = self.scanner(answer.tokens.text).scan()
        if scan.close_at is None or not answer.is_followed_by_eos(token_ids):
            return None
        spans = entry_spans(answer.tokens, (entry.end + 1 for entry in scan.entries))
        closure = (answer.tokens.token_at(scan.close_at), len(answer.ids))
        return ReadBack(self.assess(scan, answer, allow_poly=True), spans, closure)

    def keep(self, parsed: ParsedRollout, tokenizer: Tokenizer, kept: Collection[int]) -> list[int]:
        answer = read_answer(parsed.prefix_token_ids, tokenizer)
        edits = self.removals(self.scanner(answer.tokens.text).scan(), parsed, kept)
        return answer.tokens.edited(answer.ids, edits, tokenizer)

    def assess(self, scan: Scanner, answer: Answer, allow_poly: bool) -> ParsedRollout:
        """Judge the entries of a scanned answer."""
        fault = self.fault(scan, answer.tokens.text)
        place = _cut(scan, answer)
        if place is None:
            return ParsedRollout(
                objects=[],
                dropped=[],
                prefix_token_ids=answer.tokenizer.encode(self.opening, add_special_tokens=False),
                max_object_index=0,
                truncated=False,
                invalid_rollout=True,
                entry_ends=[],
                fault=fault,
            )
        end, prefix_ids = place
        objects: list[ParsedObject] = []
        dropped: list[tuple[str, str]] = []
        entry_ends: list[tuple[int, int | None]] = []
        unaligned = 0
        seen: set[str] = set()
        for number, entry in enumerate(scan.entries, start=1):
            key, index = self.name(entry, number)
            found: ParsedObject | DropReason = "key_invalid"
            if index is not None and key not in seen:
                found = read_object(entry, key, index, answer, allow_poly)
            seen.add(key)
            kept = entry.end <= end
            if isinstance(found, ParsedObject) and kept:
                entry_ends.append((found.token_span[1] - 1, len(objects)))
                objects.append(found)
                continue
            dropped.append((key, "key_invalid" if isinstance(found, ParsedObject) else found))
            unaligned += found == "non_coord_token" and _misaligns(entry, answer)
            if kept:
                entry_ends.append((answer.tokens.token_at(entry.end), None))
        if scan.unfinished is not None:
            dropped.append((self.name(scan.unfinished, len(scan.entries) + 1)[0], "key_invalid"))
        return ParsedRollout(
            objects=objects,
            dropped=dropped,
            prefix_token_ids=prefix_ids,
            max_object_index=self.largest_index(answer.tokens.text[: end + 1], scan.entries),
            truncated=scan.close_at is None,
            invalid_rollout=False,
            entry_ends=entry_ends,
            unaligned=unaligned,
            fault=fault,
        )


def other_container(text: str) -> AnswerFault | None:
    """Return why a text has no entries of a format in JSON; None for text without a bracket."""
    return "wrong_container" if _NO_CONTAINER.match(text) else lead_in(text)


def _cut(scan: Scanner, answer: Answer) -> tuple[int, list[int]] | None:
    """Return the place of the last character to keep, and the ids up to it; None for no place.

    The end of the last object, else `open_at` (PARSE-05). A place inside a token is skipped
    if no ids encode the leading piece of the token exactly.
    """
    if scan.open_at is None:
        return None
    ends = [entry.end for entry in scan.entries if entry.is_object]
    for place in (*reversed(ends), scan.open_at):
        if (ids := answer.ids_up_to(place)) is not None:
            return place, ids
    return None


# ---- one object ----------------------------------------------------------------------


def read_object(
    entry: Entry, key: str, index: int, answer: Answer, allow_poly: bool
) -> ParsedObject | DropReason:
    """Judge the value of one entry, in the order of PARSE-04.

    key, index: name and number of the object.
    """
    if not (entry.is_object and entry.well_led):
        return "key_invalid"
    inside = answer.coords_between(entry.value_start, entry.end)
    fields = _read_fields(entry, inside, answer)
    if fields is None:
        return "key_invalid"
    reason = _check_fields(fields)
    if reason is not None:
        return reason
    parsed = _build_object(entry, key, index, fields, inside, answer)
    return _check_coords(parsed, fields[parsed.kind], allow_poly) or parsed


def _misaligns(entry: Entry, answer: Answer) -> bool:
    """Return whether an entry spells coordinates in text whose ids are not their tokens."""
    inside = answer.coords_between(entry.value_start, entry.end)
    fields = _read_fields(entry, inside, answer) or {}
    lists = (value for value in fields.values() if isinstance(value, list))
    return any(all(_SPELLED.fullmatch(str(each)) for each in values) for values in lists)


def _read_fields(entry: Entry, inside: range, answer: Answer) -> dict[str, Any] | None:
    """Fields of the object; None if it is no JSON, or keys repeat or nest."""
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


def _check_coords(parsed: ParsedObject, values: Any, allow_poly: bool) -> DropReason | None:
    """Check the value of the geometry, in the order of PARSE-04."""
    # Text with the characters of a coordinate token, or a plain number, has no bin.
    if not isinstance(values, list) or len(values) != len(parsed.coords):
        return "non_coord_token"
    if not all(value in _SPELLINGS[k] for k, value in zip(parsed.coords, values, strict=True)):
        return "non_coord_token"
    if parsed.kind == "poly":
        if len(values) < 6 or len(values) % 2:
            return "wrong_arity"
        return None if allow_poly else "poly_unsupported"
    if len(values) != 4:
        return "wrong_arity"
    x1, y1, x2, y2 = parsed.coords
    return "bbox_invalid" if x2 < x1 or y2 < y1 else None


# ---- writing -------------------------------------------------------------------------


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
