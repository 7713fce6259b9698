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

import re
from collections.abc import Collection, Iterable, Sequence
from typing import SupportsIndex

from learner.stages.formats import ReadBack
from learner.stages.formats.json_objects import Answer, cut, object_text, read_answer, read_object
from learner.stages.formats.json_scanner import WHITE_SPACE, Entry, Scanner
from learner.stages.tokens import IM_END, Edit, Tokenizer
from learner.types import (
    AnswerFault,
    DropReason,
    FieldOrder,
    GroundTruthObject,
    ParsedObject,
    ParsedRollout,
    lead_in,
)
from shared_contracts.errors import ContractError

# Python turns this many digits into a number and back whatever its settings.
MAX_DIGITS = 640

_OBJECT_KEY = re.compile(rf"object_([0-9]{{1,{MAX_DIGITS}}})")
_COUNTED_KEY = re.compile(rf'"object_([0-9]{{1,{MAX_DIGITS - 1}}})"[{WHITE_SPACE}]*:')


# ---- parsing -------------------------------------------------------------------------


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
    answer = read_answer(token_ids, tokenizer, end_marker)
    return _assess(Scanner(answer.tokens.text).scan(), answer, allow_poly)


def _assess(scan: Scanner, answer: Answer, allow_poly: bool) -> ParsedRollout:
    """What a scanned answer holds."""
    place = cut(scan, answer)
    if place is None:
        return _invalid_rollout(answer)
    end, prefix_ids = place

    objects: list[ParsedObject] = []
    dropped: list[tuple[str, str]] = []
    entry_ends: list[tuple[int, int | None]] = []
    unaligned = 0
    seen: set[str] = set()
    for entry in scan.entries:
        found = _read_entry(entry, answer, seen, allow_poly)
        kept = entry.end <= end
        if isinstance(found, ParsedObject) and kept:
            entry_ends.append((found.token_span[1] - 1, len(objects)))
            objects.append(found)
            continue
        dropped.append((entry.key, "key_invalid" if isinstance(found, ParsedObject) else found))
        unaligned += found == "non_coord_token" and answer.misaligns(entry)
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
        unaligned=unaligned,
        fault=_fault(scan),
    )


def _fault(scan: Scanner) -> AnswerFault | None:
    """Return why an opened answer was not read as this format, or not to its end."""
    keys = [entry.key for entry in scan.entries]
    if scan.unfinished_key is not None:
        keys.append(scan.unfinished_key)
    if keys and not any(map(_OBJECT_KEY.fullmatch, keys)):
        return "other_format"
    if scan.unpaired:
        return "wrong_container"
    return "text_behind" if scan.text_behind else None


def _invalid_rollout(answer: Answer) -> ParsedRollout:
    """Nothing of the response can be kept; the sample trains on all its ground truth."""
    return ParsedRollout(
        objects=[],
        dropped=[],
        prefix_token_ids=answer.tokenizer.encode("{", add_special_tokens=False),
        max_object_index=0,
        truncated=False,
        invalid_rollout=True,
        entry_ends=[],
        fault=lead_in(answer.tokens.text),
    )


def _max_object_index(prefix_text: str, entries: list[Entry]) -> int:
    """Of all keys, and of what an entry without a colon has for a key: its name is taken, too."""
    numbers = [key[1] for key in _COUNTED_KEY.finditer(prefix_text)]
    names = [_OBJECT_KEY.fullmatch(e.key) for e in entries if e.end < len(prefix_text)]
    numbers += [name[1] for name in names if name is not None and len(name[1]) < MAX_DIGITS]
    return max(map(int, numbers), default=0)


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


# ---- one entry -----------------------------------------------------------------------


def _read_entry(
    entry: Entry, answer: Answer, seen: set[str], allow_poly: bool
) -> ParsedObject | DropReason:
    """Judge one entry; `seen` holds the keys before it and takes this one's."""
    key = _OBJECT_KEY.fullmatch(entry.key)
    repeated = entry.key in seen
    seen.add(entry.key)
    if key is None or repeated:
        return "key_invalid"
    return read_object(entry, entry.key, int(key[1]), answer, allow_poly)


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
    return f'"{object_key(index)}": {object_text(item, field_order, (", ", ": "))}'


# ---- the format ----------------------------------------------------------------------


class CoordJson:
    """The format; a subclass may end its answers otherwise."""

    end_marker = IM_END

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
        answer = read_answer(token_ids, tokenizer, self.end_marker)
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
        answer = read_answer(parsed.prefix_token_ids, tokenizer, self.end_marker)
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
