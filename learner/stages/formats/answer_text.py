"""The text of an answer: its tokens up to where it ends, its coordinates and its entries."""

import operator
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, SupportsIndex

from learner.stages.tokens import (
    HALF_CHARACTER,
    CoordVocab,
    Edit,
    Tokenizer,
    TokenText,
    decode_exactly,
    spell_leading,
    token_table,
)
from learner.types import AnswerFault, DropReason, GeometryKind

WHITE_SPACE = " \t\n\r"

# Place of what has not come yet.
NOWHERE = -1


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

    def coords_between(self, start: int, end: int) -> range:
        """Return the indices into `coords` of those that begin in [start, end)."""
        return range(bisect_left(self.coord_starts, start), bisect_left(self.coord_starts, end))

    def ids_up_to(self, place: int) -> list[int] | None:
        """Return ids that spell the text up to the character at `place`; None if no ids do.

        place: -1 is before the first character.
        """
        if place < 0:
            return []
        token = self.tokens.token_at(place)
        leading = self.tokens.text[self.tokens.start_of(token) : place + 1]
        if leading == self.tokens.pieces[token]:
            return self.ids[: token + 1]
        spelled = spell_leading(self.tokenizer, self.ids[token], leading)
        return None if spelled is None else self.ids[:token] + spelled

    def exact_text(self, start: int, end: int, replaced: Mapping[int, str] | None = None) -> str:
        """Return the text between two places; tokens that share a character are decoded together.

        What stands beside it in its first and last token is ASCII. replaced: texts of tokens, each
        in the place of its own.
        """
        text = self.tokens.text[start:end]
        if not replaced and HALF_CHARACTER not in text:
            return text
        first, last = self.tokens.token_at(start), self.tokens.token_at(end - 1)
        pieces = self._joined_pieces(first, last)
        for token, new in (replaced or {}).items():
            pieces[token - first] = new
        whole = "".join(pieces)
        before = start - self.tokens.start_of(first)
        behind = self.tokens.start_of(last + 1) - end
        return whole[before : len(whole) - behind]

    def _joined_pieces(self, first: int, last: int) -> list[str]:
        """Return the text of the tokens first..last; those that share a character as one."""
        joined: list[str] = []
        position = first
        pieces = self.tokens.pieces[first : last + 1]
        for half, group in groupby(pieces, lambda piece: HALF_CHARACTER in piece):
            run = list(group)
            if half:
                ids = self.ids[position : position + len(run)]
                joined += [decode_exactly(self.tokenizer, ids)] + [""] * (len(run) - 1)
            else:
                joined += run
            position += len(run)
        return joined

    def is_followed_by_eos(self, token_ids: Sequence[int]) -> bool:
        """Return whether the EOS follows the answer in `token_ids`."""
        return list(token_ids[len(self.ids) : len(self.ids) + 1]) == [self.vocab.end_id]


@dataclass(slots=True)
class Entry:
    """One entry of an answer; places are offsets into its text.

    start, end: its first and its last character. In an object of objects it starts with the opening
        quote of its key, in a list with its value.
    has_shape: the value is `{...}`, or the line has a coordinate; an answer can be cut behind it.

    Of formats in JSON alone:

    key: as written between its quotes, "" where there is none.
    value_start: the opening brace of a value that is an object, else `NOWHERE`.
    well_led: exactly one comma (none for the first entry), and in an object a key and a colon,
        came before the value.
    strings, nested: of a well-led object only: [start, end) of each string in it with its
        quotes, and whether braces open inside it or brackets more than `MAX_BRACKETS` deep.
    """

    start: int = NOWHERE
    end: int = NOWHERE
    has_shape: bool = False
    key: str = ""
    value_start: int = NOWHERE
    well_led: bool = True
    strings: list[tuple[int, int]] = field(default_factory=list)
    nested: bool = False


@dataclass
class Scan:
    """The entries of an answer, as its format finds them.

    open_at, close_at: places of the characters that open and close the answer; None: not found.
        `open_at` is -1 in a format without an opening.
    entries: those that have ended, in order. unfinished: the one in which the answer ended.
    unpaired: an object stands in brackets, or a bracket between objects closes none.
    """

    open_at: int | None = None
    close_at: int | None = None
    entries: list[Entry] = field(default_factory=list)
    unfinished: Entry | None = None
    unpaired: bool = False


def read_answer(token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer) -> Answer:
    """Read response ids, each of them alone, up to `<|im_end|>` or a placeholder (PARSE-02).

    Raises `ContractError` for a tokenizer without the tokens of the format.
    """
    table = token_table(tokenizer)
    ids = list(map(operator.index, token_ids))
    ends = table.vocab.end_ids.intersection(ids)
    ids = ids[: min(map(ids.index, ends), default=len(ids))]
    tokens = TokenText(table.pieces(ids, tokenizer))
    coords = table.vocab.coords_of(ids)
    starts = [tokens.start_of(position) for position in coords]
    return Answer(ids, tokens, coords, starts, table.vocab, tokenizer)


def lead_in(text: str) -> AnswerFault | None:
    """Return what a text of no known format begins with; None for text without a bracket.

    `other_format`: a brace or a bracket.
    """
    text = text.lstrip(WHITE_SPACE)
    if text.startswith("```"):
        return "fenced"
    if text.startswith(("{", "[")):
        return "other_format"
    return "prose_before" if "{" in text or "[" in text else None


def shape_fault(kind: GeometryKind, bins: Sequence[int], allow_poly: bool) -> DropReason | None:
    """Check the coordinates of a shape, in the order of PARSE-04."""
    if kind == "poly":
        if len(bins) < 6 or len(bins) % 2:
            return "wrong_arity"
        return None if allow_poly else "poly_unsupported"
    if len(bins) != 4:
        return "wrong_arity"
    x1, y1, x2, y2 = bins
    return "bbox_invalid" if x2 < x1 or y2 < y1 else None


def entry_spans(tokens: TokenText, ends: Iterable[int]) -> list[tuple[int, int]]:
    """Return the tokens [start, end) of each entry (`ReadBack.spans`).

    ends: the places behind the last character of the entries, in order.
    """
    spans = []
    start = 0
    for behind in ends:
        end = tokens.token_at(behind - 1) + 1
        spans.append((start, end))
        start = end if tokens.start_of(end) == behind else end - 1
    return spans


def removals(spans: Sequence[tuple[int, int]], kept: Collection[int]) -> list[Edit]:
    """Return the edits that leave only the entries `kept`, one for each run of removed ones.

    An entry goes with the separator before it. If the first entry goes, the one behind goes.

    spans: places of the first character and behind the last character of the entries, in order.
    """
    edits, first = list[Edit](), min(kept, default=len(spans))
    if first > 0:
        edits.append(Edit(spans[0][0], spans[first][0] if kept else spans[-1][1], ""))
    for place in range(first + 1, len(spans)):
        if place not in kept:
            start = begin = spans[place - 1][1]
            if edits and edits[-1].end == begin:
                start = edits.pop().start
            edits.append(Edit(start, spans[place][1], ""))
    return edits
