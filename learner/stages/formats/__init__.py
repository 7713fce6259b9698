"""How an answer is written: one module for each format, chosen by `custom.answer_format`.

A format reads an answer strictly, continues and closes a kept prefix, and reads a finished target
back. `docs/architecture.md` says how another one is added.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol, SupportsIndex

from learner.config.registry import ANSWER_FORMATS, load_registered
from learner.config.schema import Config
from learner.stages.tokens import Tokenizer
from learner.types import FieldOrder, GroundTruthObject, ParsedRollout
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import OBJECT_KEY_CONTEXTS


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
    """What the stages ask of an answer format.

    end_marker: token at which an answer ends, the EOS of every target.
    entry_contexts: texts that end in what every entry begins with, as answers write it; the
        repeat guard counts what they have in common (`max_object_keys`).
    """

    @property
    def end_marker(self) -> str: ...
    @property
    def entry_contexts(self) -> tuple[str, ...]: ...

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

        kept: places in `parsed.entry_ends`, the first entry among them.

        Valid entries behind a removed one are numbered anew; no other text of the kept ones
        changes. A token keeps its id where all of its text stays.
        """

    def key(self, index: int) -> str:
        """Name of the object with number `index`, as logs have it."""

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


def answer_format(config: Config) -> AnswerFormat:
    """The format that a run writes and reads.

    Raises ContractError where its servers would count other entries than its own.
    """
    found: AnswerFormat = load_registered(ANSWER_FORMATS, config.custom.answer_format)
    rollout = config.rollout_matching
    counts = rollout.repeat_terminate.enabled and rollout.repeat_terminate.max_object_keys
    if counts and rollout.backend != "hf" and found.entry_contexts != OBJECT_KEY_CONTEXTS:
        raise ContractError(
            "rollout_matching.repeat_terminate.max_object_keys",
            "rollout servers count the entries of object_keys, and custom.answer_format is "
            f"{config.custom.answer_format}",
            "Set it to null, or rollout_matching.rollout_backend to hf",
        )
    return found
