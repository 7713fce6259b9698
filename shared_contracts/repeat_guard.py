"""When a sequence being generated has started to repeat itself (REP-01 to REP-03).

RepeatTerminateConfig    `rollout_matching.repeat_terminate`, for HF and vLLM alike
RepeatGuard              the state of one sequence: ids in, verdict out

The logits processors that force the end of a sequence are shells around `RepeatGuard`.
"""

from collections import deque
from collections.abc import Sequence

from pydantic import Field, field_validator

from shared_contracts.errors import ContractError
from shared_contracts.strict_model import Refusal, StrictModel


class RepeatTerminateConfig(StrictModel):
    enabled: bool = Field(default=False, description="end sequences that repeat themselves")
    min_new_tokens: int = Field(
        default=0, ge=0, description="generated tokens before which no sequence is ended"
    )
    max_consecutive_token_repeats: int = Field(
        default=0, ge=0, description="length of a run of one token that ends a sequence; 0: off"
    )
    ngram_size: int = Field(default=0, ge=0, description="tokens of a repeated block; 0: off")
    ngram_repeats: int = Field(
        default=0, ge=0, description="equal blocks in a row that end a sequence; 0: off, else >= 2"
    )
    max_object_keys: int | None = Field(
        default=None, ge=1, description="object keys that end a sequence; null: off"
    )

    @field_validator("ngram_repeats")
    @classmethod
    def _one_block_is_no_repeat(cls, repeats: int) -> int:
        if repeats == 1:
            raise Refusal("1 is not accepted", "Use 2 or more, or 0 to switch it off")
        return repeats


class RepeatGuard:
    """Verdict over the generated tokens of one sequence, amortized O(1) per token.

    A sequence triggers at the first token, `min_new_tokens` or later, after which
    (a) the trailing run of one id is at least `max_consecutive_token_repeats` long, or
    (b) the last `ngram_repeats` blocks of `ngram_size` ids are equal, or
    (c) `object_key_token_ids` has occurred at least `max_object_keys` times.

    (b) keeps `ngram_size` ids and one number: the last r blocks of n ids are equal exactly
    when each of the last n * (r - 1) ids equals the one n before it.

    object_key_token_ids: ids of `"object_`; ContractError when empty though (c) is on.
    """

    def __init__(self, config: RepeatTerminateConfig, object_key_token_ids: Sequence[int]) -> None:
        self._config = config
        self._keys: _OccurrenceCounter | None = None
        if config.enabled and config.max_object_keys is not None:
            self._keys = _OccurrenceCounter(object_key_token_ids)
        self._recent: deque[int] = deque(maxlen=config.ngram_size)
        self._last: int | None = None
        self._generated = 0
        self._same_token_run = 0
        self._same_block_run = 0
        self._triggered = False

    def push(self, token_id: int) -> bool:
        """Take the next generated id; whether the sequence has triggered, now or before."""
        if self._config.enabled and not self._triggered:
            self._count(token_id)
            reached = self._generated >= self._config.min_new_tokens
            self._triggered = reached and self._repeats()
        return self._triggered

    def _count(self, token_id: int) -> None:
        self._generated += 1
        self._same_token_run = self._same_token_run + 1 if token_id == self._last else 1
        self._last = token_id
        if self._config.ngram_size:
            block_before = len(self._recent) == self._config.ngram_size
            same = block_before and self._recent[0] == token_id
            self._same_block_run = self._same_block_run + 1 if same else 0
            self._recent.append(token_id)
        if self._keys is not None:
            self._keys.push(token_id)

    def _repeats(self) -> bool:
        config = self._config
        if 0 < config.max_consecutive_token_repeats <= self._same_token_run:
            return True
        if 0 < config.ngram_size * (config.ngram_repeats - 1) <= self._same_block_run:
            return True
        return (
            self._keys is not None
            and config.max_object_keys is not None
            and self._keys.count >= config.max_object_keys
        )


class _OccurrenceCounter:
    """How often a pattern has occurred in a stream, overlaps included (Knuth-Morris-Pratt)."""

    def __init__(self, pattern: Sequence[int]) -> None:
        if not pattern:
            raise ContractError(
                "object_key_token_ids",
                "the list is empty and max_object_keys is set",
                'Give the token ids of `"object_`',
            )
        self.count = 0
        self._pattern = tuple(pattern)
        self._matched = 0
        # Length of the longest proper prefix of pattern[: i + 1] that is its suffix too.
        self._border = [0]
        for token_id in self._pattern[1:]:
            self._border.append(self._advance(self._border[-1], token_id))

    def push(self, token_id: int) -> None:
        self._matched = self._advance(self._matched, token_id)
        if self._matched == len(self._pattern):
            self.count += 1
            self._matched = self._border[-1]

    def _advance(self, matched: int, token_id: int) -> int:
        """Length of the longest prefix that ends with `token_id`, given that of before it."""
        while matched and self._pattern[matched] != token_id:
            matched = self._border[matched - 1]
        return matched + 1 if self._pattern[matched] == token_id else 0
