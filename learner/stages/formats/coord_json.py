"""The default answer format: one JSON object of objects, with coordinate tokens.

    {"object_1": {"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", ...]}, ...}<|im_end|>

The strict parser (PARSE-01 to 07) returns the objects of an answer and the place of its cut.
`append` is the one serializer of both channels (APPEND-01).

Each id is decoded alone, and each entry of the outermost object is assessed separately. A
coordinate is recognized by its id, never by its text. Nothing is repaired. An entry that breaks a
rule is dropped with the first reason that applies (PARSE-04), the others stay.

    ids      {" object _1 ": {" desc ": " cat ", ... ]}}          }} is one token
    cut                                              ^ after the first } of it
    prefix   the ids before that token, and the ids of ]}

Same ids, same result; no ids raise; time is linear in the number of ids (PARSE-07).

Three decisions where the rules leave room:

- The token of an image or a video (`<|image_pad|>`) ends an answer as `<|im_end|>` does: it is
  no text, and a forward replaces it by pixels.
- A key of more than 640 digits is no `object_n`. One of 640 digits is, and does not count for the
  largest n, so the key after the largest n can always be read back (APPEND-02).
- Brackets more than `MAX_BRACKETS` deep in an object count as nested keys (`key_invalid`).
"""

import re
from collections.abc import Collection, Sequence

from learner.stages.formats import WHITE_SPACE, Entry, Scan, object_key
from learner.stages.formats.json_objects import JsonFormat, object_text, other_container
from learner.stages.tokens import Edit
from learner.types import (
    AnswerFault,
    FieldOrder,
    GroundTruthObject,
    ParsedObject,
    ParsedRollout,
)
from shared_contracts.errors import ContractError

# Python turns this many digits into a number and back whatever its settings.
MAX_DIGITS = 640

_OBJECT_KEY = re.compile(rf"object_([0-9]{{1,{MAX_DIGITS}}})")
_COUNTED_KEY = re.compile(rf'"object_([0-9]{{1,{MAX_DIGITS - 1}}})"[{WHITE_SPACE}]*:')


class CoordJson(JsonFormat):
    is_list = False
    opening = "{"

    def name(self, entry: Entry, number: int) -> tuple[str, int | None]:
        key = _OBJECT_KEY.fullmatch(entry.key)
        return entry.key, None if key is None else int(key[1])

    def largest_index(self, prefix_text: str, entries: Sequence[Entry]) -> int:
        """Return the largest number of all keys, also of an entry without a colon."""
        numbers = [key[1] for key in _COUNTED_KEY.finditer(prefix_text)]
        names = [_OBJECT_KEY.fullmatch(e.key) for e in entries if e.end < len(prefix_text)]
        numbers += [name[1] for name in names if name is not None and len(name[1]) < MAX_DIGITS]
        return max(map(int, numbers), default=0)

    def fault(self, scan: Scan, text: str, objects: Sequence[ParsedObject]) -> AnswerFault | None:
        keys = [entry.key for entry in scan.entries]
        if scan.unfinished is not None:
            keys.append(scan.unfinished.key)
        if keys and not any(map(_OBJECT_KEY.fullmatch, keys)):
            return other_container(text)
        return super().fault(scan, text, objects)

    def removals(self, scan: Scan, prefix: ParsedRollout, kept: Collection[int]) -> list[Edit]:
        """Return also the edits that give valid entries behind a gap new numbers."""
        edits = super().removals(scan, prefix, kept)
        largest = 0  # number of the entries kept so far
        entries = zip(scan.entries, prefix.entry_ends, strict=True)
        for place, (entry, (_, index)) in enumerate(entries):
            if place not in kept or (number := self.name(entry, 0)[1]) is None:
                continue
            if index is not None and edits and edits[0].start < entry.start:
                number, name = largest + 1, entry.start + 1
                edits.append(Edit(name, name + len(entry.key), object_key(number)))
            largest = max(largest, number)
        return sorted(edits)

    def append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        start_index: int,
        field_order: FieldOrder,
    ) -> str:
        """Return the text that continues `prefix_text` with `objects` and closes the answer.

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
            f'"{object_key(index)}": {object_text(item, field_order, (", ", ": "))}'
            for index, item in enumerate(objects, start=start_index)
        )
        return (", " if last == "}" and objects else "") + entries + "}"


COORD_JSON = CoordJson()

# The public names (ARCH-02).
parse_rollout = COORD_JSON.parse
serialize_append = COORD_JSON.append
serialize_objects = COORD_JSON.write
