"""An answer format of the tests: a line for each object, other numbers, another end marker.

1. cat <|coord_10|><|coord_20|><|coord_300|><|coord_400|>
2. red dog <|coord_500|>...
.<|endoftext|>
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import SupportsIndex

from learner.stages.coords import coord_token
from learner.stages.formats import ReadBack
from learner.stages.tokens import Edit, Tokenizer, TokenText, spell_leading, token_table
from learner.types import FieldOrder, GroundTruthObject, ParsedObject, ParsedRollout

_LINE = re.compile(r"(\d+)\. (.*?) ((?:<\|coord_\d+\|>)*)\n")


class Lines:
    end_marker = "<|endoftext|>"

    def parse(
        self, token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer, *, allow_poly: bool = True
    ) -> ParsedRollout:
        table = token_table(tokenizer, self.end_marker)
        ids = [int(each) for each in token_ids]
        ends = [i for i, token in enumerate(ids) if token in table.vocab.end_ids]
        ids = ids[: ends[0]] if ends else ids
        tokens = TokenText(table.pieces(ids, tokenizer))
        objects: list[ParsedObject] = []
        dropped: list[tuple[str, str]] = []
        entry_ends: list[tuple[int, int | None]] = []
        place = 0
        while line := _LINE.match(tokens.text, place):
            place = line.end()
            span = tokens.token_at(line.start()), tokens.token_at(place - 1) + 1
            at = [i for i in range(*span) if ids[i] in table.vocab.bins]
            kept = len(at) == 4
            entry_ends.append((span[1] - 1, len(objects) if kept else None))
            if not kept:
                dropped.append((line[1], "wrong_arity"))
                continue
            bins = [table.vocab.bins[ids[i]] for i in at]
            desc_at = tokens.tokens_between(*line.span(2))
            objects.append(
                ParsedObject(line[1], int(line[1]), "bbox_2d", bins, line[2], at, span, desc_at)
            )
        prefix = self._prefix(ids, tokens, place, tokenizer)
        return ParsedRollout(
            objects=objects,
            dropped=dropped,
            prefix_token_ids=prefix,
            max_object_index=len(entry_ends),
            truncated=tokens.text[place:] != ".",
            invalid_rollout=not tokens.text,
            entry_ends=entry_ends,
        )

    @staticmethod
    def _prefix(ids: list[int], tokens: TokenText, end: int, tokenizer: Tokenizer) -> list[int]:
        """Ids of the text up to `end`, which may be inside of a token."""
        if end == 0:
            return []
        last = tokens.token_at(end - 1)
        leading = tokens.text[tokens.start_of(last) : end]
        spelled = [ids[last]]
        if leading != tokens.pieces[last]:
            found = spell_leading(tokenizer, ids[last], leading)
            assert found is not None
            spelled = found
        return ids[:last] + spelled

    def read_back(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> ReadBack | None:
        eos = token_table(tokenizer, self.end_marker).vocab.end_id
        if eos not in token_ids:
            return None
        end = list(token_ids).index(eos)
        parsed = self.parse(token_ids, tokenizer)
        if parsed.truncated:
            return None
        starts = [0, *(last + 1 for last, _ in parsed.entry_ends)]
        spans = [
            (start, last + 1) for start, (last, _) in zip(starts, parsed.entry_ends, strict=False)
        ]
        return ReadBack(parsed, spans, (end - 1, end))

    def keep(self, parsed: ParsedRollout, tokenizer: Tokenizer, kept: Collection[int]) -> list[int]:
        ids = parsed.prefix_token_ids
        tokens = TokenText(token_table(tokenizer, self.end_marker).pieces(ids, tokenizer))
        edits = []
        number = 0
        for place, line in enumerate(_LINE.finditer(tokens.text)):
            number += place in kept
            removed = Edit(*line.span(), "")
            edits.append(Edit(*line.span(1), str(number)) if place in kept else removed)
        return tokens.edited(ids, edits, tokenizer)

    def key(self, index: int) -> str:
        return str(index)

    def write(self, objects: Sequence[GroundTruthObject], field_order: FieldOrder) -> str:
        return self.append("", objects, 1, field_order)

    def append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        start_index: int,
        field_order: FieldOrder,
    ) -> str:
        lines = (
            f"{index}. {item.desc} {''.join(map(coord_token, item.shape.coords))}\n"
            for index, item in enumerate(objects, start_index)
        )
        return "".join(lines) + "."


LINES = Lines()
