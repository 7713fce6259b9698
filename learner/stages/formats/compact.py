r"""The shortest answer format: a line for each object, its description and its coordinate tokens.

    cat<|coord_10|><|coord_20|><|coord_300|><|coord_400|>\n
    red dog<|coord_500|><|coord_510|><|coord_700|><|coord_710|>\n
    .<|im_end|>

Four coordinates are a box, six or more a polygon. With `geometry_first` the coordinates come before
the description. A dot closes the answer and distinguishes a complete answer from a truncated one.
With Qwen's tokenizer an object takes its description and five tokens.

An entry is a line with its newline. A coordinate is recognized by its id, never by its text.
Nothing is repaired: a line with an error is dropped with the first reason that applies, in the
order of `_judge`. An entry has no key of its own; logs number entries from `object_1` on.

A description is any text of one line that is not blank and has no coordinate tokens. The target of
a sample with another description cannot be read.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, SupportsIndex

from learner.stages.coords import coord_token
from learner.stages.formats import ReadBack, object_key
from learner.stages.formats.answer_text import Answer, entry_spans, lead_in, read_answer, removals
from learner.stages.tokens import Tokenizer
from learner.types import (
    AnswerFault,
    DropReason,
    FieldOrder,
    GeometryKind,
    GroundTruthObject,
    ParsedObject,
    ParsedRollout,
)

CLOSING = "."
_LINE = re.compile(r"[^\n]*\n")
_BRACKETS = re.compile(r"^[ \t,]*[{}\[\]][ \t,{}\[\]]*\.?$", re.MULTILINE)


class _Line(NamedTuple):
    """start, end: places of its first character, and behind its newline.

    coords: positions of the coordinate tokens in it.
    """

    start: int
    end: int
    coords: list[int]


class _Scan(NamedTuple):
    """The complete lines of an answer. closed: only the dot follows the last line."""

    lines: list[_Line]
    closed: bool


class Compact:
    """The format, as `learner.stages.formats` describes it."""

    def parse(
        self, token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer, *, allow_poly: bool = True
    ) -> ParsedRollout:
        answer = read_answer(token_ids, tokenizer)
        return _assess(_scan(answer), answer, allow_poly)

    def read_back(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> ReadBack | None:
        answer = read_answer(token_ids, tokenizer)
        scan, eos = _scan(answer), len(answer.ids)
        if not scan.closed or not answer.is_followed_by_eos(token_ids):
            return None
        spans = entry_spans(answer.tokens, (line.end for line in scan.lines))
        return ReadBack(_assess(scan, answer, allow_poly=True), spans, (eos - 1, eos))

    def keep(self, parsed: ParsedRollout, tokenizer: Tokenizer, kept: Collection[int]) -> list[int]:
        answer = read_answer(parsed.prefix_token_ids, tokenizer)
        edits = removals([(line.start, line.end) for line in _scan(answer).lines], kept)
        return answer.tokens.edited(answer.ids, edits, tokenizer)

    def write(self, objects: Sequence[GroundTruthObject], field_order: FieldOrder) -> str:
        return self.append("", objects, 1, field_order)

    def append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        start_index: int,
        field_order: FieldOrder,
    ) -> str:
        return "".join(_written(item, field_order) for item in objects) + CLOSING


def _scan(answer: Answer) -> _Scan:
    """Find the lines; one pass over the text and the coordinates."""
    text, lines, place = answer.tokens.text, list[_Line](), 0
    while found := _LINE.match(text, place):
        inside = answer.coords_between(place, found.end())
        lines.append(_Line(place, found.end(), [answer.coords[i] for i in inside]))
        place = found.end()
    return _Scan(lines, text[place:] == CLOSING)


def _written(item: GroundTruthObject, field_order: FieldOrder) -> str:
    geometry = "".join(map(coord_token, item.shape.coords))
    parts = (item.desc, geometry) if field_order == "desc_first" else (geometry, item.desc)
    return f"{''.join(parts)}\n"


def _assess(scan: _Scan, answer: Answer, allow_poly: bool) -> ParsedRollout:
    kept, prefix_ids = _cut(scan.lines, answer)
    objects: list[ParsedObject] = []
    dropped: list[tuple[str, str]] = []
    entry_ends: list[tuple[int, int | None]] = []
    for number, line in enumerate(scan.lines, start=1):
        found = _judge(line, number, answer, allow_poly)
        within = number <= kept
        last = answer.tokens.token_at(line.end - 1)
        if isinstance(found, ParsedObject) and within:
            entry_ends.append((last, len(objects)))
            objects.append(found)
            continue
        dropped.append(
            (object_key(number), "key_invalid" if isinstance(found, ParsedObject) else found)
        )
        if within:
            entry_ends.append((last, None))
    rest = answer.tokens.text[scan.lines[-1].end if scan.lines else 0 :]
    if rest and not scan.closed:
        dropped.append((object_key(len(scan.lines) + 1), "key_invalid"))
    nothing = not scan.lines and not scan.closed and bool(rest)
    return ParsedRollout(
        objects=objects,
        dropped=dropped,
        prefix_token_ids=prefix_ids,
        max_object_index=kept,
        truncated=not scan.closed and not nothing,
        invalid_rollout=nothing,
        entry_ends=entry_ends,
        fault=_fault(answer.tokens.text, bool(objects)),
    )


def _fault(text: str, has_objects: bool) -> AnswerFault | None:
    """Return why a text is not read, or has lines of brackets alone."""
    if not has_objects:
        return lead_in(text)
    return "wrong_container" if _BRACKETS.search(text) else None


def _cut(lines: Sequence[_Line], answer: Answer) -> tuple[int, list[int]]:
    """Return the number of kept lines, and their ids: all up to the last one with a coordinate.

    A line is skipped if no ids encode its end.
    """
    for kept in range(len(lines), 0, -1):
        line = lines[kept - 1]
        if line.coords and (ids := answer.ids_up_to(line.end - 1)) is not None:
            return kept, ids
    return 0, []


def _judge(line: _Line, number: int, answer: Answer, allow_poly: bool) -> ParsedObject | DropReason:
    """Return the object of a complete line, or the first reason to drop it."""
    tokens, coords = answer.tokens, line.coords
    if not coords:
        return "missing_geom"
    if coords[-1] - coords[0] != len(coords) - 1:
        return "non_coord_token"
    before = (line.start, tokens.start_of(coords[0]))
    behind = (tokens.start_of(coords[-1] + 1), line.end - 1)
    described = [place for place in (before, behind) if place[0] < place[1]]
    if len(described) > 1:
        return "non_coord_token"
    desc = answer.exact_text(*described[0]) if described else ""
    if not desc.strip():
        return "missing_desc"
    bins = [answer.vocab.bins[answer.ids[position]] for position in coords]
    kind: GeometryKind = "bbox_2d" if len(bins) == 4 else "poly"
    if len(bins) < 4 or len(bins) % 2:
        return "wrong_arity"
    if kind == "poly" and not allow_poly:
        return "poly_unsupported"
    if kind == "bbox_2d" and (bins[2] < bins[0] or bins[3] < bins[1]):
        return "bbox_invalid"
    return ParsedObject(
        key=object_key(number),
        index=number,
        kind=kind,
        coords=bins,
        desc=desc,
        coord_token_indices=coords,
        token_span=(tokens.token_at(line.start), tokens.token_at(line.end - 1) + 1),
        desc_token_indices=tokens.tokens_between(*described[0]),
    )


COMPACT = Compact()
