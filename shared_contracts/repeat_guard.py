"""Detection of repetition in a generated sequence (REP-01 to REP-03).

RepeatTerminateConfig    `rollout_matching.repeat_terminate`, for HF and vLLM
ENTRY_CONTEXTS           by answer format, text that occurs once in every entry
entry_token_ids          the token ids that end each of these texts
RepeatGuard              the state of one sequence

Logits processors use `RepeatGuard` to force the end of a sequence.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator

from shared_contracts.errors import ContractError
from shared_contracts.strict_model import Refusal, StrictModel

# By answer format: contexts that end in text which occurs once in every entry of an answer.
ENTRY_CONTEXTS: dict[str, tuple[str, ...]] = {
    "object_keys": ('"object_', '{"object_', '}, "object_'),
    # The key of a description, in both field orders. The quote after it is left out: a BPE merges
    # it with a description that begins with punctuation.
    "objects_array": ('[{"desc', '},{"desc', '}, {"desc', '"],"desc', '"], "desc'),
    # The newline, a separate token in targets.
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
    min_new_tokens: int = Field(default=0, ge=0)
    """number of generated tokens before which no sequence is ended"""
    max_consecutive_token_repeats: int = Field(default=0, ge=0)
    """number of equal tokens in a row that ends a sequence; 0: off"""
    ngram_size: int = Field(default=0, ge=0)
    """length of a repeated block in tokens; 0: off"""
    ngram_repeats: int = Field(default=0, ge=0)
    """number of equal blocks in a row that ends a sequence; 0: off, else >= 2"""
    max_object_keys: int | None = Field(default=None, ge=1)
    """number of entries that ends a sequence; null: off"""
    answer_format: AnswerFormatName = "object_keys"
    """format of the entries that max_object_keys counts; a training YAML leaves it out, because it
    is custom.answer_format there"""

    @field_validator("ngram_repeats")
    @classmethod
    def _one_block_is_no_repeat(cls, repeats: int) -> int:
        if repeats == 1:
            raise Refusal("1 is not accepted", "Use 2 or more, or 0 to switch it off")
        return repeats


def entry_token_ids(encode: Callable[[str], Sequence[int]], answer_format: str) -> list[int]:
    """Return the token ids that occur once in every entry: the common end of all contexts.

    A BPE merges the quote of `"object_` with the text before it (`{"`, ` "`), so only the ids
    after the quote are common. Qwen: `object`, `_`.

    encode: text to ids, without special tokens. answer_format: a key of `ENTRY_CONTEXTS`.
    """
    backwards = [encode(text)[::-1] for text in ENTRY_CONTEXTS[answer_format]]
    alike = takewhile(lambda ids: len(set(ids)) == 1, zip(*backwards, strict=False))
    return [token_id for token_id, *_ in alike][::-1]


class RepeatGuard:
    """Repetition state of one sequence, O(1) for each id.

    A sequence triggers at the first id, not before `min_new_tokens`, after which
    (a) the trailing run of one id is at least `max_consecutive_token_repeats` long, or
    (b) the last `ngram_repeats` blocks of `ngram_size` ids are equal, or
    (c) `object_key_token_ids` has occurred at least `max_object_keys` times.

    (b) is equivalent to: each of the last n * (r - 1) ids equals the id n places before it. So the
    guard needs only counters and the newest ids, at least n. A rule that is off has an unreachable
    limit.

    triggered: whether the sequence has triggered.
    object_key_token_ids: from `entry_token_ids`. Raises ContractError if they are empty and (c)
        is on.
    """

    def __init__(self, config: RepeatTerminateConfig, object_key_token_ids: Sequence[int]) -> None:
        if config.enabled and config.max_object_keys is not None and not object_key_token_ids:
            found = "the list is empty and max_object_keys is set"
            do = "Give the token ids that every entry has once (entry_token_ids)"
            raise ContractError("object_key_token_ids", found, do)
        self._min_new_tokens = config.min_new_tokens
        self._run_limit = config.max_consecutive_token_repeats or sys.maxsize
        self._block_size = config.ngram_size or 1
        self._block_limit = config.ngram_size * max(config.ngram_repeats - 1, 0) or sys.maxsize
        self._key_limit = config.max_object_keys or sys.maxsize
        self._key = list(object_key_token_ids)
        self._key_end = self._key[-1] if self._key else None
        self._recent: deque[int] = deque(maxlen=max(self._block_size, len(self._key)))
        self._last: int | None = None
        self._generated = self._run = self._block_run = self._keys = 0
        self.triggered = False
        self._settled = not config.enabled

    def push(self, token_id: int) -> bool:
        """Take the next generated id; return whether the sequence has triggered, now or before."""
        if self._settled:
            return self.triggered
        generated = self._generated = self._generated + 1
        run = self._run = self._run + 1 if token_id == self._last else 1
        self._last = token_id
        recent, size = self._recent, self._block_size
        same = generated > size and recent[-size] == token_id
        block_run = self._block_run = self._block_run + 1 if same else 0
        recent.append(token_id)
        if token_id == self._key_end and [*recent][-len(self._key) :] == self._key:
            self._keys += 1
        if (
            run >= self._run_limit
            or block_run >= self._block_limit
            or self._keys >= self._key_limit
        ):
            self.triggered = self._settled = generated >= self._min_new_tokens
        return self.triggered
