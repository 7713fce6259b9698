"""Answer formats: one module for each, chosen by `custom.answer_format`.

A format parses an answer strictly, continues and closes a kept prefix, and reads a finished target.
CONTRIBUTING.md explains how to add one.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol, SupportsIndex

from learner.config.registry import ANSWER_FORMATS, load_registered
from learner.config.schema import Config
from learner.stages.tokens import Tokenizer
from learner.types import FieldOrder, GroundTruthObject, ParsedRollout


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


class AnswerFormat(Protocol):
    """The interface of an answer format. Every answer ends with `<|im_end|>`.

    The marks that the repeat guard counts are in `shared_contracts.repeat_guard.ENTRY_CONTEXTS`.
    """

    def parse(
        self, token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer, *, allow_poly: bool = True
    ) -> ParsedRollout:
        """Return the objects of the response ids, and the prefix that can be continued.

        allow_poly: false if polygons are dropped.

        Accepts all ids. Raises `ContractError` for a tokenizer without the tokens of the format.
        """

    def read_back(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> ReadBack | None:
        """Read a finished target, polygons allowed; None if no EOS follows its closed answer."""

    def keep(self, parsed: ParsedRollout, tokenizer: Tokenizer, kept: Collection[int]) -> list[int]:
        """Return the ids of the prefix of `parsed` with only some of its entries.

        kept: places in `parsed.entry_ends`; may be empty.

        Valid entries behind a removed one get new numbers; no other text of the kept ones changes.
        A token keeps its id if all of its text stays.
        """

    def write(self, objects: Sequence[GroundTruthObject], field_order: FieldOrder) -> str:
        """Return a whole answer without its end marker; objects are numbered from 1."""

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


def object_key(index: int) -> str:
    """Return the name of the object with number `index`, as in logs."""
    return f"object_{index}"


def answer_format(config: Config) -> AnswerFormat:
    """Return the answer format of a run."""
    found: AnswerFormat = load_registered(ANSWER_FORMATS, config.custom.answer_format)
    return found
