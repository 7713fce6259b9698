r"""The shortest answer format: a line for each object, its description and its coordinate tokens.

    cat<|coord_10|><|coord_20|><|coord_300|><|coord_400|>\n
    red dog<|coord_500|><|coord_510|><|coord_700|><|coord_710|>\n
    .<|im_end|>

Four coordinates are a box, six or more a polygon. With `geometry_first` the coordinates come before
the description. A dot closes the answer, so that one that ends early can be told from one that is
complete. With Qwen's tokenizer an object takes its description and five tokens.

An entry is a line that has ended. A coordinate is known by its id, never by its text. Nothing is
repaired: a line that breaks a rule is dropped with the first reason that applies, in the order of
`_judge`. An entry has no key of its own; logs number them from `object_1` on.

A description is any text of one line without coordinate tokens that is not blank. Another one
cannot be written; the target of such a sample cannot be read back.
"""

import operator
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, SupportsIndex

from learner.stages.coords import coord_token
from learner.stages.formats import ReadBack
from learner.stages.tokens import (
    HALF_CHARACTER,
    IM_END,
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
    lead_in,
)

CLOSING = "."
_LINE = re.compile(r"[^\n]*\n")


class _Line(NamedTuple):
    """start, end: places of its first character, and behind its newline.

    coords: positions of the coordinate tokens in it.
    """

    start: int
    end: int
    coords: list[int]


class _Answer(NamedTuple):
    """A response up to where it ends. closed: the dot stands behind the last line, alone."""

    ids: list[int]
    tokens: TokenText
    bins: dict[int, int]
    lines: list[_Line]
    closed: bool
    tokenizer: Tokenizer


class Compact:
    """The format, as `learner.stages.formats` describes it."""

    end_marker = IM_END

    def parse(
        self, token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer, *, allow_poly: bool = True
    ) -> ParsedRollout:
        return _assess(self._read(token_ids, tokenizer), allow_poly)

    def read_back(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> ReadBack | None:
        answer = self._read(token_ids, tokenizer)
        eos = len(answer.ids)
        end_id = token_table(tokenizer, self.end_marker).vocab.end_id
        if not answer.closed or list(token_ids[eos : eos + 1]) != [end_id]:
            return None
        tokens = answer.tokens
        spans = []
        start = 0
        for line in answer.lines:
            end = tokens.token_at(line.end - 1) + 1
            spans.append((start, end))
            start = end if tokens.start_of(end) == line.end else end - 1
        return ReadBack(_assess(answer, allow_poly=True), spans, (eos - 1, eos))

    def keep(self, parsed: ParsedRollout, tokenizer: Tokenizer, kept: Collection[int]) -> list[int]:
        answer = self._read(parsed.prefix_token_ids, tokenizer)
        edits: list[Edit] = []
        for place, line in enumerate(answer.lines):
            if place not in kept:
                joined = edits and edits[-1].end == line.start
                start = edits.pop().start if joined else line.start
                edits.append(Edit(start, line.end, ""))
        return answer.tokens.edited(answer.ids, edits, tokenizer)

    def key(self, index: int) -> str:
        return f"object_{index}"

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

    def _read(self, token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer) -> _Answer:
        table = token_table(tokenizer, self.end_marker)
        ids = list(map(operator.index, token_ids))
        ends = table.vocab.end_ids.intersection(ids)
        ids = ids[: min(map(ids.index, ends), default=len(ids))]
        tokens = TokenText(table.pieces(ids, tokenizer))
        coords = iter([*table.vocab.coords_of(ids), len(ids)])
        lines = []
        coord, place = next(coords), 0
        while found := _LINE.match(tokens.text, place):
            place = found.end()
            own = []
            while coord < len(ids) and tokens.start_of(coord) < place:
                own.append(coord)
                coord = next(coords)
            lines.append(_Line(found.start(), place, own))
        closed = tokens.text[place:] == CLOSING
        return _Answer(ids, tokens, table.vocab.bins, lines, closed, tokenizer)


def _written(item: GroundTruthObject, field_order: FieldOrder) -> str:
    geometry = "".join(map(coord_token, item.shape.coords))
    parts = (item.desc, geometry) if field_order == "desc_first" else (geometry, item.desc)
    return f"{''.join(parts)}\n"


def _assess(answer: _Answer, allow_poly: bool) -> ParsedRollout:
    kept, prefix_ids = _cut(answer)
    objects: list[ParsedObject] = []
    dropped: list[tuple[str, str]] = []
    entry_ends: list[tuple[int, int | None]] = []
    for number, line in enumerate(answer.lines, start=1):
        found = _judge(line, number, answer, allow_poly)
        within = number <= kept
        last = answer.tokens.token_at(line.end - 1)
        if isinstance(found, ParsedObject) and within:
            entry_ends.append((last, len(objects)))
            objects.append(found)
            continue
        dropped.append(
            (f"object_{number}", "key_invalid" if isinstance(found, ParsedObject) else found)
        )
        if within:
            entry_ends.append((last, None))
    rest = answer.tokens.text[answer.lines[-1].end if answer.lines else 0 :]
    if rest and not answer.closed:
        dropped.append((f"object_{len(answer.lines) + 1}", "key_invalid"))
    nothing = not answer.lines and not answer.closed and bool(rest)
    return ParsedRollout(
        objects=objects,
        dropped=dropped,
        prefix_token_ids=prefix_ids,
        max_object_index=kept,
        truncated=not answer.closed and not nothing,
        invalid_rollout=nothing,
        entry_ends=entry_ends,
        fault=None if objects else lead_in(answer.tokens.text),
    )


def _cut(answer: _Answer) -> tuple[int, list[int]]:
    """How many lines are kept, and their ids: all up to the last one with a coordinate.

    A line whose end no ids spell is passed over for the one before it.
    """
    tokens = answer.tokens
    for kept in range(len(answer.lines), 0, -1):
        line = answer.lines[kept - 1]
        if not line.coords:
            continue
        last = tokens.token_at(line.end - 1)
        leading = tokens.text[tokens.start_of(last) : line.end]
        spelled: list[int] | None = [answer.ids[last]]
        if leading != tokens.pieces[last]:
            spelled = spell_leading(answer.tokenizer, answer.ids[last], leading)
        if spelled is not None:
            return kept, answer.ids[:last] + spelled
    return 0, []


def _judge(
    line: _Line, number: int, answer: _Answer, allow_poly: bool
) -> ParsedObject | DropReason:
    """One ended line, valid or with the first reason against it."""
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
    desc = _exact(*described[0], answer) if described else ""
    if not desc.strip():
        return "missing_desc"
    bins = [answer.bins[answer.ids[position]] for position in coords]
    kind: GeometryKind = "bbox_2d" if len(bins) == 4 else "poly"
    if len(bins) < 4 or len(bins) % 2:
        return "wrong_arity"
    if kind == "poly" and not allow_poly:
        return "poly_unsupported"
    if kind == "bbox_2d" and (bins[2] < bins[0] or bins[3] < bins[1]):
        return "bbox_invalid"
    return ParsedObject(
        key=f"object_{number}",
        index=number,
        kind=kind,
        coords=bins,
        desc=desc,
        coord_token_indices=coords,
        token_span=(tokens.token_at(line.start), tokens.token_at(line.end - 1) + 1),
        desc_token_indices=tokens.tokens_between(*described[0]),
    )


def _exact(start: int, end: int, answer: _Answer) -> str:
    """The text between two places; tokens that share a character are decoded together."""
    tokens = answer.tokens
    text = tokens.text[start:end]
    if HALF_CHARACTER not in text:
        return text
    first, last = tokens.token_at(start), tokens.token_at(end - 1)
    whole = decode_exactly(answer.tokenizer, answer.ids[first : last + 1])
    # What stands beside the description in its tokens is ASCII: a newline.
    before = start - tokens.start_of(first)
    behind = tokens.start_of(last + 1) - end
    return whole[before : len(whole) - behind]


COMPACT = Compact()
