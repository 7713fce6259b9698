"""How an answer is written: one module for each format, chosen by `custom.answer_format`.

A format reads an answer strictly, continues and closes a kept prefix, and reads a finished target
back. CONTRIBUTING.md explains how to add another one.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol, SupportsIndex

from learner.config.registry import ANSWER_FORMATS, load_registered
from learner.config.schema import Config
from learner.stages.tokens import Tokenizer
from learner.types import FieldOrder, GroundTruthObject, ParsedRollout


class ReadBack(NamedTuple):
    """A finished target as its format reads it; places are positions of its tokens.

    parsed: what `parse` finds in it.
    spans: [start, end) of each entry, with all that leads up to it; a token whose text goes on
        behind the last character of an entry is in the next one, too.
    closure: the token that closes the answer, and the EOS after it.
    """

    parsed: ParsedRollout
    spans: list[tuple[int, int]]
    closure: tuple[int, int]


class AnswerFormat(Protocol):
    """What the stages ask of an answer format. Every answer ends with `<|im_end|>`.

    What the repeat guard counts is in `shared_contracts.repeat_guard.ENTRY_CONTEXTS`.
    """

    def parse(
        self, token_ids: Iterable[SupportsIndex], tokenizer: Tokenizer, *, allow_poly: bool = True
    ) -> ParsedRollout:
        """What the response ids hold, and the prefix of them that can be continued.

        allow_poly: false where polygons are dropped.

        No ids raise; `ContractError` only for a tokenizer without the tokens of the format.
        """

    def read_back(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> ReadBack | None:
        """Read a finished target, polygons allowed; None where no EOS follows its closed answer."""

    def keep(self, parsed: ParsedRollout, tokenizer: Tokenizer, kept: Collection[int]) -> list[int]:
        """The ids of the prefix of `parsed` with only some of its entries.

        kept: places in `parsed.entry_ends`; may be empty.

        Valid entries behind a removed one are numbered anew; no other text of the kept ones
        changes. A token keeps its id where all of its text stays.
        """

    def write(self, objects: Sequence[GroundTruthObject], field_order: FieldOrder) -> str:
        """A whole answer without its end marker; objects are numbered from 1."""

    def append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        start_index: int,
        field_order: FieldOrder,
    ) -> str:
        """Text that continues `prefix_text` with `objects` and closes the answer.

        prefix_text: of a prefix that `parse` gave. start_index: number of the first object.
        """


def object_key(index: int) -> str:
    """Name of the object with number `index`, as logs have it."""
    return f"object_{index}"


def answer_format(config: Config) -> AnswerFormat:
    """The format that a run writes and reads."""
    found: AnswerFormat = load_registered(ANSWER_FORMATS, config.custom.answer_format)
    return found
