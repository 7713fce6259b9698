"""When a sequence being generated has started to repeat itself (REP-01 to REP-03).

RepeatTerminateConfig    `rollout_matching.repeat_terminate`, for HF and vLLM alike
ENTRY_CONTEXTS           by answer format, what every entry of an answer has once; their names are
                         `AnswerFormatName`
entry_token_ids          what of it a tokenizer always writes alike
RepeatGuard              the state of one sequence: ids in, verdict out

The logits processors that force the end of a sequence are shells around `RepeatGuard`.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator

from shared_contracts.errors import ContractError
from shared_contracts.strict_model import Refusal, StrictModel

# By answer format: texts that end in what every entry of an answer has once, as answers write it.
ENTRY_CONTEXTS: dict[str, tuple[str, ...]] = {
    "object_keys": ('"object_', '{"object_', '}, "object_'),
    # The key of a description, in either order of the fields. What follows it is left out: a BPE
    # fuses the quotes with a description that begins with punctuation.
    "objects_array": ('[{"desc', '},{"desc', '}, {"desc', '"],"desc', '"], "desc'),
    # The end of a line, which targets have as a token of its own.
    "compact": ("\n",),
}


def _known_format(name: str) -> str:
    if name not in ENTRY_CONTEXTS:
        *others, last = ENTRY_CONTEXTS
        raise Refusal(f"'{name}' is not known", f"Use {', '.join(others)} or {last}")
    return name


AnswerFormatName = Annotated[
    str,
    AfterValidator(_known_format),
    WithJsonSchema({"type": "string", "enum": list(ENTRY_CONTEXTS)}),
]


class RepeatTerminateConfig(StrictModel):
    """What ends a sequence that repeats itself; a rule that is 0 or null is off."""

    enabled: bool = Field(default=False, description="end sequences that repeat themselves")
    min_new_tokens: int = Field(
        default=0, ge=0, description="number of generated tokens before which no sequence is ended"
    )
    max_consecutive_token_repeats: int = Field(
        default=0, ge=0, description="number of equal tokens in a row that ends a sequence; 0: off"
    )
    ngram_size: int = Field(
        default=0, ge=0, description="length of a repeated block in tokens; 0: off"
    )
    ngram_repeats: int = Field(
        default=0,
        ge=0,
        description="number of equal blocks in a row that ends a sequence; 0: off, else >= 2",
    )
    max_object_keys: int | None = Field(
        default=None, ge=1, description="number of entries that ends a sequence; null: off"
    )
    answer_format: AnswerFormatName = Field(
        default="object_keys",
        description="format of the entries that max_object_keys counts; a training YAML leaves it "
        "out, because it is custom.answer_format there",
    )

    @field_validator("ngram_repeats")
    @classmethod
    def _one_block_is_no_repeat(cls, repeats: int) -> int:
        if repeats == 1:
            raise Refusal("1 is not accepted", "Use 2 or more, or 0 to switch it off")
        return repeats

    @property
    def run_limit(self) -> int:
        """So many equal ids in a row end a sequence; a number nothing reaches where it is off."""
        return self.max_consecutive_token_repeats or sys.maxsize

    @property
    def block_limit(self) -> int:
        """So many ids in a row that equal the one `ngram_size` before them, likewise."""
        blocks = self.ngram_size * (self.ngram_repeats - 1)
        return blocks if blocks > 0 else sys.maxsize


def entry_token_ids(encode: Callable[[str], Sequence[int]], answer_format: str) -> list[int]:
    """The ids that every entry of an answer has once; with `object_keys`, the end of `"object_`.

    A BPE fuses the quote with what stands before it (`{"`, ` "`), so the ids of `"object_`
    by itself may never occur; those behind the quote do. Qwen: `object`, `_`.

    encode: text to ids, without special tokens. answer_format: a key of `ENTRY_CONTEXTS`.
    """
    backwards = [encode(text)[::-1] for text in ENTRY_CONTEXTS[answer_format]]
    alike = takewhile(lambda ids: len(set(ids)) == 1, zip(*backwards, strict=False))
    return [token_id for token_id, *_ in alike][::-1]


class RepeatGuard:
    """Verdict over the generated tokens of one sequence, amortized O(1) per token.

    A sequence triggers at the first token, `min_new_tokens` or later, after which
    (a) the trailing run of one id is at least `max_consecutive_token_repeats` long, or
    (b) the last `ngram_repeats` blocks of `ngram_size` ids are equal, or
    (c) `object_key_token_ids` has occurred at least `max_object_keys` times.

    (b) keeps `ngram_size` ids and one number: the last r blocks of n ids are equal exactly
    when each of the last n * (r - 1) ids equals the one n before it.

    `push` runs for every row of every decode step and is written for speed: slots, locals,
    and a rule that is off has a limit nothing reaches.

    object_key_token_ids: of an entry, from `entry_token_ids`; ContractError when empty though
        (c) is on.
    """

    __slots__ = (
        "_block_limit",
        "_block_run",
        "_generated",
        "_keys",
        "_last",
        "_min_new_tokens",
        "_ngram_size",
        "_recent",
        "_run",
        "_run_limit",
        "_settled",
        "_triggered",
    )

    def __init__(self, config: RepeatTerminateConfig, object_key_token_ids: Sequence[int]) -> None:
        self._min_new_tokens = config.min_new_tokens
        self._run_limit = config.run_limit
        self._run = 0
        self._last: int | None = None
        self._block_limit = config.block_limit
        self._block_run = 0
        self._ngram_size = config.ngram_size or 1
        self._recent: deque[int] = deque(maxlen=self._ngram_size)
        self._keys: _OccurrenceCounter | None = None
        if config.enabled and config.max_object_keys is not None:
            self._keys = _OccurrenceCounter(object_key_token_ids, config.max_object_keys)
        self._generated = 0
        self._triggered = False
        self._settled = not config.enabled

    def push(self, token_id: int) -> bool:
        """Take the next generated id; whether the sequence has triggered, now or before."""
        if self._settled:
            return self._triggered
        generated = self._generated = self._generated + 1
        run = self._run = self._run + 1 if token_id == self._last else 1
        self._last = token_id
        recent = self._recent
        same = generated > self._ngram_size and recent[0] == token_id
        block_run = self._block_run = self._block_run + 1 if same else 0
        recent.append(token_id)
        keys = self._keys
        if keys is not None and (keys.matched or token_id == keys.head):
            keys.push(token_id)
        if (
            run >= self._run_limit
            or block_run >= self._block_limit
            or (keys is not None and keys.reached)
        ):
            self._triggered = self._settled = generated >= self._min_new_tokens
        return self._triggered

    @property
    def slack(self) -> int:
        """So many more ids cannot trigger, whatever they are; 0 for one that has triggered."""
        if self._settled:
            return 0 if self._triggered else sys.maxsize
        needed = min(self._run_limit - self._run, self._block_limit - self._block_run)
        if self._keys is not None:
            needed = min(needed, self._keys.needed)
        return max(needed, self._min_new_tokens - self._generated, 1) - 1


class _OccurrenceCounter:
    """Whether a pattern has occurred `limit` times, overlaps included (Knuth-Morris-Pratt).

    While `matched` is 0 only the id `head` changes anything.
    """

    __slots__ = ("_border", "_left", "_pattern", "head", "matched", "reached")

    def __init__(self, pattern: Sequence[int], limit: int) -> None:
        if not pattern:
            raise ContractError(
                "object_key_token_ids",
                "the list is empty and max_object_keys is set",
                "Give the token ids that every entry has once (entry_token_ids)",
            )
        self.head = pattern[0]
        self.matched = 0
        self.reached = False
        self._left = limit
        self._pattern = tuple(pattern)
        # Length of the longest proper prefix of pattern[: i + 1] that is its suffix too.
        self._border = [0]
        for token_id in self._pattern[1:]:
            self._border.append(self._advance(self._border[-1], token_id))

    @property
    def needed(self) -> int:
        """No fewer ids can reach the limit; occurrences may overlap."""
        return max(self._left - 1 + len(self._pattern) - self.matched, 0)

    def push(self, token_id: int) -> None:
        self.matched = self._advance(self.matched, token_id)
        if self.matched == len(self._pattern):
            self._left -= 1
            self.reached = self._left <= 0
            self.matched = self._border[-1]

    def _advance(self, matched: int, token_id: int) -> int:
        """Length of the longest prefix that ends with `token_id`, given that of before it."""
        while matched and self._pattern[matched] != token_id:
            matched = self._border[matched - 1]
        return matched + 1 if self._pattern[matched] == token_id else 0
