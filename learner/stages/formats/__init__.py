"""Answer formats: one module for each, chosen by `custom.answer_format`.

A format parses an answer strictly, continues and closes a kept prefix, and reads a finished target.
`AnswerFormat` has what all formats do with the entries of an answer; a format finds, judges and
writes them. CONTRIBUTING.md explains how to add one.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar, NamedTuple, SupportsIndex

from learner.config.registry import ANSWER_FORMATS, load_registered
from learner.config.schema import Config
from learner.stages.formats.answer_text import (
    Answer,
    Entry,
    Scan,
    entry_spans,
    read_answer,
    removals,
)
from learner.stages.tokens import Edit, Tokenizer
from learner.types import (
    AnswerFault,
    DropReason,
    FieldOrder,
    GroundTruthObject,
    ParsedObject,
    ParsedRollout,
)


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

    # ---- what a format defines -------------------------------------------------------

    def scan(self, answer: Answer) -> Scan:
        """Find the entries of an answer."""
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
        """Return the edits that leave only some entries of a prefix."""
        return removals([(entry.start, entry.end + 1) for entry in scan.entries], kept)

    # ---- what all formats do ---------------------------------------------------------

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
        """Judge the entries of a scanned answer."""
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


def object_key(index: int) -> str:
    """Return the name of the object with number `index`, as in logs."""
    return f"object_{index}"


def answer_format(config: Config) -> AnswerFormat:
    """Return the answer format of a run."""
    found: AnswerFormat = load_registered(ANSWER_FORMATS, config.custom.answer_format)
    return found
