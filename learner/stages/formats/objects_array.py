r"""A list of objects in JSON, without spaces and without keys for the objects.

    {"objects":[{"desc":"cat","bbox_2d":["<|coord_10|>",...]},{"desc":"red dog",...}]}<|im_end|>

The parser reads any JSON of this form: white space anywhere, either order of the fields, bare
coordinate tokens. Nothing is repaired. An item that breaks a rule is dropped with the first reason
that applies (PARSE-04). An item has no key of its own; logs number them from `object_1` on.

Written without spaces, the quotes and commas between two coordinates are one token of Qwen's
tokenizer (`","`), and those between two objects are one, too (`},{"`). So a box takes 18 to 20
tokens. Bare coordinates would take as many, and the answer would be no valid JSON (RES-12).

    cut      the end of the last complete item, or the opening bracket
    prefix   {"objects":[{...},{...}     append continues it with ,{...} and closes with ]}

An answer that does not begin with `{"objects":[` has no objects; its target is the annotation
(`invalid_rollout`). After the list only the outermost brace may follow. The reading stops at a
brace where the list is still open.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import SupportsIndex

from learner.stages.formats import ReadBack
from learner.stages.formats.json_objects import Answer, cut, object_text, read_answer, read_object
from learner.stages.formats.json_scanner import WHITE_SPACE, ListScanner
from learner.stages.tokens import IM_END, Edit, Tokenizer
from learner.types import FieldOrder, GroundTruthObject, ParsedObject, ParsedRollout, lead_in
from shared_contracts.errors import ContractError

HEAD, CLOSING = '{"objects":[', "]}"
SEPARATORS = (",", ":")


class ObjectsArray:
    """The format, as `learner.stages.formats` describes it."""

    end_marker = IM_END

    def parse(
        self, token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer, *, allow_poly: bool = True
    ) -> ParsedRollout:
        answer = read_answer(token_ids, tokenizer, self.end_marker)
        return _assess(ListScanner(answer.tokens.text), answer, allow_poly)

    def read_back(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> ReadBack | None:
        answer = read_answer(token_ids, tokenizer, self.end_marker)
        tokens, eos = answer.tokens, len(answer.ids)
        scan = ListScanner(tokens.text)
        parsed = _assess(scan, answer, allow_poly=True)
        if scan.close_at is None or list(token_ids[eos : eos + 1]) != [answer.vocab.end_id]:
            return None
        spans = []
        start = 0
        for entry in scan.entries:
            end = tokens.token_at(entry.end) + 1
            spans.append((start, end))
            start = end if tokens.start_of(end) == entry.end + 1 else end - 1
        return ReadBack(parsed, spans, (tokens.token_at(scan.close_at), eos))

    def keep(self, parsed: ParsedRollout, tokenizer: Tokenizer, kept: Collection[int]) -> list[int]:
        answer = read_answer(parsed.prefix_token_ids, tokenizer, self.end_marker)
        edits: list[Edit] = []
        begin = 0
        for place, entry in enumerate(ListScanner(answer.tokens.text).scan().entries):
            if place not in kept:
                joined = edits and edits[-1].end == begin
                start = edits.pop().start if joined else begin
                edits.append(Edit(start, entry.end + 1, ""))
            begin = entry.end + 1
        return answer.tokens.edited(answer.ids, edits, tokenizer)

    def key(self, index: int) -> str:
        return f"object_{index}"

    def write(self, objects: Sequence[GroundTruthObject], field_order: FieldOrder) -> str:
        return HEAD + self.append(HEAD, objects, 1, field_order)

    def append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        start_index: int,
        field_order: FieldOrder,
    ) -> str:
        last = prefix_text.rstrip(WHITE_SPACE)[-1:]
        if last not in ("}", "["):
            raise ContractError(
                "append.prefix_text",
                f"it ends in {prefix_text[-20:]!r}",
                "Cut it after the `}` of an item or after the opening `[`",
            )
        items = ",".join(object_text(item, field_order, SEPARATORS) for item in objects)
        return ("," if last == "}" and items else "") + items + CLOSING


def _assess(scan: ListScanner, answer: Answer, allow_poly: bool) -> ParsedRollout:
    """What an answer holds; `scan` is at its beginning."""
    scan.scan()
    place = cut(scan, answer)
    if place is None:
        cut_short = HEAD.startswith("".join(answer.tokens.text.split()))
        return ParsedRollout(
            objects=[],
            dropped=[],
            prefix_token_ids=answer.tokenizer.encode(HEAD, add_special_tokens=False),
            max_object_index=0,
            truncated=False,
            invalid_rollout=True,
            entry_ends=[],
            fault=None if cut_short else lead_in(answer.tokens.text),
        )
    end, prefix_ids = place

    objects: list[ParsedObject] = []
    dropped: list[tuple[str, str]] = []
    entry_ends: list[tuple[int, int | None]] = []
    unaligned = 0
    for number, entry in enumerate(scan.entries, start=1):
        key = f"object_{number}"
        found = read_object(entry, key, number, answer, allow_poly)
        kept = entry.end <= end
        if isinstance(found, ParsedObject) and kept:
            entry_ends.append((found.token_span[1] - 1, len(objects)))
            objects.append(found)
            continue
        dropped.append((key, "key_invalid" if isinstance(found, ParsedObject) else found))
        unaligned += found == "non_coord_token" and answer.misaligns(entry)
        if kept:
            entry_ends.append((answer.tokens.token_at(entry.end), None))
    if scan.unfinished_key is not None or scan.garbage:
        dropped.append((f"object_{len(scan.entries) + 1}", "key_invalid"))

    return ParsedRollout(
        objects=objects,
        dropped=dropped,
        prefix_token_ids=prefix_ids,
        max_object_index=len(entry_ends),
        truncated=scan.close_at is None,
        invalid_rollout=False,
        entry_ends=entry_ends,
        unaligned=unaligned,
        fault="wrong_container" if scan.unpaired else "text_behind" if scan.text_behind else None,
    )


OBJECTS_ARRAY = ObjectsArray()
