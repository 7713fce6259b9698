r"""The shortest answer format: a line for each object, its description and its coordinate tokens.

    cat<|coord_10|><|coord_20|><|coord_300|><|coord_400|>\n
    red dog<|coord_500|><|coord_510|><|coord_700|><|coord_710|>\n
    .<|im_end|>

Four coordinates are a box, six or more a polygon. With `geometry_first` the coordinates come before
the description. A dot closes the answer and distinguishes a complete answer from a truncated one.
With Qwen's tokenizer an object takes its description and five tokens.

An entry is a line with its newline. A coordinate is recognized by its id, never by its text.
Nothing is repaired: a line with an error is dropped with the first reason that applies, in the
order of `judge`. An entry has no key of its own; logs number entries from `object_1` on.

A description is any text of one line that is not blank and has no coordinate tokens. The target of
a sample with another description cannot be read.
"""

import re
from collections.abc import Sequence

from learner.stages.formats import Answer, AnswerFormat, Entry, Scan, lead_in, shape_fault
from learner.stages.tokens import coord_token
from learner.types import (
    AnswerFault,
    DropReason,
    FieldOrder,
    GeometryKind,
    GroundTruthObject,
    ParsedObject,
)

CLOSING = "."
_LINE = re.compile(r"[^\n]*\n")
_BRACKETS = re.compile(r"^[ \t,]*[{}\[\]][ \t,{}\[\]]*\.?$", re.MULTILINE)


class Compact(AnswerFormat):
    opening = ""
    forbidden = "\n"

    def scan(self, answer: Answer) -> Scan:
        """Find the complete lines; one pass over the text and the coordinates.

        A text without a line is no answer, if it has more than the closing dot.
        """
        text, found, place = answer.tokens.text, Scan(), 0
        while line := _LINE.match(text, place):
            inside = answer.coords_between(place, line.end())
            found.entries.append(Entry(place, line.end() - 1, has_shape=bool(inside)))
            place = line.end()
        if text[place:] == CLOSING:
            found.close_at = place
        elif place < len(text):
            found.unfinished = Entry(place)
        if found.entries or found.unfinished is None:
            found.open_at = -1
        return found

    def fault(self, scan: Scan, text: str, objects: Sequence[ParsedObject]) -> AnswerFault | None:
        if not objects:
            return lead_in(text)
        return "wrong_container" if _BRACKETS.search(text) else None  # lines of brackets alone

    def judge(
        self, entry: Entry, key: str, index: int, answer: Answer, allow_poly: bool
    ) -> ParsedObject | DropReason:
        tokens, inside = answer.tokens, answer.coords_between(entry.start, entry.end)
        coords = answer.coords[inside.start : inside.stop]
        if not coords:
            return "missing_geom"
        if coords[-1] - coords[0] != len(coords) - 1:
            return "non_coord_token"
        before = (entry.start, tokens.start_of(coords[0]))
        behind = (tokens.start_of(coords[-1] + 1), entry.end)
        described = [place for place in (before, behind) if place[0] < place[1]]
        if len(described) > 1:
            return "non_coord_token"
        desc = answer.exact_text(*described[0]) if described else ""
        if not desc.strip():
            return "missing_desc"
        bins = [answer.vocab.bins[answer.ids[position]] for position in coords]
        kind: GeometryKind = "bbox_2d" if len(bins) == 4 else "poly"
        return shape_fault(kind, bins, allow_poly) or ParsedObject(
            key=key,
            index=index,
            kind=kind,
            coords=bins,
            desc=desc,
            coord_token_indices=coords,
            token_span=(tokens.token_at(entry.start), tokens.token_at(entry.end) + 1),
            desc_token_indices=tokens.tokens_between(*described[0]),
        )

    def append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        start_index: int,
        field_order: FieldOrder,
    ) -> str:
        return "".join(_written(item, field_order) for item in objects) + CLOSING


def _written(item: GroundTruthObject, field_order: FieldOrder) -> str:
    geometry = "".join(map(coord_token, item.shape.coords))
    parts = (item.desc, geometry) if field_order == "desc_first" else (geometry, item.desc)
    return f"{''.join(parts)}\n"


COMPACT = Compact()
