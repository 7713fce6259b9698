"""Answer formats: one module for each, chosen by `custom.answer_format`.

A format parses an answer strictly, continues and closes a kept prefix, and reads a finished target.
`AnswerFormat` has what all formats do with the entries of an answer; a format finds, judges and
writes them. CONTRIBUTING.md explains how to add one.
"""

import operator
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar, NamedTuple, SupportsIndex

from learner.config.registry import ANSWER_FORMATS, load_registered
from learner.config.schema import Config
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
from learner.types import (
    AnswerFault,
    DropReason,
    FieldOrder,
    GeometryKind,
    GroundTruthObject,
    ParsedObject,
    ParsedRollout,
)

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


class ReadBack(NamedTuple):
    """A finished target as its format reads it; places are positions of its tokens.

    parsed: the result of `parse`.
    spans: [start, end) of each entry with its separator and key; a token whose text continues
        behind the last character of an entry is in the next one, too.
    closure: the token that closes the answer, and the EOS after it.
    """

    parsed: ParsedRollout
    spans: list[tuple[int, int]]
    closure: tuple[int, int]


class AnswerFormat:
    """The base class of the formats. Every answer ends with `<|im_end|>`.

    The marks that the repeat guard counts are in `shared_contracts.repeat_guard.ENTRY_CONTEXTS`.

    opening: text of the prefix if nothing of an answer can be kept.
    forbidden: characters that end an entry, and that no description can have.
    """

    opening: ClassVar[str]
    forbidden: ClassVar[str] = ""

    def scan(self, answer: Answer) -> Scan:
        raise NotImplementedError

    def judge(
        self, entry: Entry, key: str, index: int, answer: Answer, allow_poly: bool
    ) -> ParsedObject | DropReason:
        """Return the object of a complete entry, or the first reason to drop it (PARSE-04).

        key, index: its name and number.
        """
        raise NotImplementedError

    def append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        start_index: int,
        field_order: FieldOrder,
    ) -> str:
        """Return the text that continues `prefix_text` with `objects` and closes the answer.

        prefix_text: of a prefix of `parse`. start_index: number of the first object.
        """
        raise NotImplementedError

    def fault(self, scan: Scan, text: str, objects: Sequence[ParsedObject]) -> AnswerFault | None:
        """Return why `text` was not read as this format, or not to its end."""
        raise NotImplementedError

    def misaligns(self, entry: Entry, answer: Answer) -> bool:
        """Return whether an entry spells coordinates in text whose ids are not their tokens."""
        return False

    def name(self, entry: Entry, number: int) -> tuple[str, int | None]:
        """Return the key of an entry as logs have it, and its index; None: a wrong key.

        number: of the entry, from 1.
        """
        return object_key(number), number

    def largest_index(self, prefix_text: str, entries: Sequence[Entry]) -> int:
        """Return the largest index in a prefix, which its entries and others have taken."""
        return sum(entry.end < len(prefix_text) for entry in entries)

    def removals(self, scan: Scan, prefix: ParsedRollout, kept: Collection[int]) -> list[Edit]:
        """Return the edits that leave only the entries `kept` of a prefix."""
        return removals([(entry.start, entry.end + 1) for entry in scan.entries], kept)

    def parse(
        self, token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer, *, allow_poly: bool = True
    ) -> ParsedRollout:
        """Return the objects of the response ids, and the prefix that can be continued.

        allow_poly: false if polygons are dropped.

        Accepts all ids. Raises `ContractError` for a tokenizer without the tokens of the format.
        """
        answer = read_answer(token_ids, tokenizer)
        return self._assess(self.scan(answer), answer, allow_poly)

    def read_back(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> ReadBack | None:
        """Read a finished target, polygons allowed; None if no EOS follows its closed answer."""
        answer = read_answer(token_ids, tokenizer)
        scan = self.scan(answer)
        if scan.close_at is None or not answer.is_followed_by_eos(token_ids):
            return None
        spans = entry_spans(answer.tokens, (entry.end + 1 for entry in scan.entries))
        closure = (answer.tokens.token_at(scan.close_at), len(answer.ids))
        return ReadBack(self._assess(scan, answer, allow_poly=True), spans, closure)

    def keep(self, parsed: ParsedRollout, tokenizer: Tokenizer, kept: Collection[int]) -> list[int]:
        """Return the ids of the prefix of `parsed` with only some of its entries.

        kept: places in `parsed.entry_ends`; may be empty.

        Valid entries behind a removed one get new numbers; no other text of the kept ones changes.
        A token keeps its id if all of its text stays.
        """
        answer = read_answer(parsed.prefix_token_ids, tokenizer)
        edits = self.removals(self.scan(answer), parsed, kept)
        return answer.tokens.edited(answer.ids, edits, tokenizer)

    def write(self, objects: Sequence[GroundTruthObject], field_order: FieldOrder) -> str:
        """Return a whole answer without its end marker; objects are numbered from 1."""
        return self.opening + self.append(self.opening, objects, 1, field_order)

    def _assess(self, scan: Scan, answer: Answer, allow_poly: bool) -> ParsedRollout:
        text, read = answer.tokens.text, scan
        cut = _cut(scan, answer)
        if cut is None and scan.open_at is not None:  # no ids spell its opening
            read = Scan()
        end, prefix_ids = cut or (
            -1,
            answer.tokenizer.encode(self.opening, add_special_tokens=False),
        )
        objects: list[ParsedObject] = []
        dropped: list[tuple[str, str]] = []
        entry_ends: list[tuple[int, int | None]] = []
        unaligned = 0
        seen: set[str] = set()
        for number, entry in enumerate(read.entries, start=1):
            key, index = self.name(entry, number)
            found: ParsedObject | DropReason = "key_invalid"
            if index is not None and key not in seen:
                found = self.judge(entry, key, index, answer, allow_poly)
            seen.add(key)
            kept, last = entry.end <= end, answer.tokens.token_at(entry.end)
            if isinstance(found, ParsedObject) and kept:
                entry_ends.append((last, len(objects)))
                objects.append(found)
                continue
            dropped.append((key, "key_invalid" if isinstance(found, ParsedObject) else found))
            unaligned += found == "non_coord_token" and self.misaligns(entry, answer)
            if kept:
                entry_ends.append((last, None))
        if read.unfinished is not None:
            dropped.append((self.name(read.unfinished, len(read.entries) + 1)[0], "key_invalid"))
        return ParsedRollout(
            objects=objects,
            dropped=dropped,
            prefix_token_ids=prefix_ids,
            max_object_index=self.largest_index(text[: end + 1], read.entries),
            truncated=read.open_at is not None and read.close_at is None,
            invalid_rollout=read.open_at is None,
            entry_ends=entry_ends,
            unaligned=unaligned,
            fault=self.fault(scan, text, objects),
        )


def _cut(scan: Scan, answer: Answer) -> tuple[int, list[int]] | None:
    """Return the place of the last character to keep, and the ids up to it; None for no place.

    The end of the last entry that has a shape, else `open_at` (PARSE-05). A place inside a token is
    skipped if no ids encode the leading piece of the token exactly.
    """
    if scan.open_at is None:
        return None
    ends = [entry.end for entry in scan.entries if entry.has_shape]
    for place in (*reversed(ends), scan.open_at):
        if (ids := answer.ids_up_to(place)) is not None:
            return place, ids
    return None


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


def object_key(index: int) -> str:
    return f"object_{index}"


def answer_format(config: Config) -> AnswerFormat:
    found: AnswerFormat = load_registered(ANSWER_FORMATS, config.custom.answer_format)
    return found


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
