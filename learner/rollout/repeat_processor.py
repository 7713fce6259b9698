"""The repeat guard inside transformers' `generate`, as inside vLLM (REP-03)."""

from collections.abc import Sequence
from functools import partial

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig, entry_token_ids


class RepeatProcessor(LogitsProcessor):
    """A logits processor that ends rows that repeat themselves, in one `generate` call.

    A row that triggers can only continue with the first of `eos_token_ids`; the other rows
    are left as they are. One object serves one call.

    prompt_length: width of the prompts, padding included; only what follows is guarded.
    eos_token_ids: what ends a row; nothing is forced behind it.
    """

    def __init__(
        self,
        config: RepeatTerminateConfig,
        tokenizer: PreTrainedTokenizerBase,
        prompt_length: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        entry = entry_token_ids(encode, config.answer_format)
        self._make_guard = partial(RepeatGuard, config, entry)
        self._prompt_length = prompt_length
        self._eos_token_ids = tuple(eos_token_ids)
        self._seen: torch.Tensor | None = None
        self._guards: list[RepeatGuard] = []
        self._ended: list[bool] = []
        self._forced: set[tuple[int, ...]] = set()
        self._triggered: list[bool] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change the scores. input_ids: rows x tokens so far; scores: rows x vocabulary."""
        for row, token_ids in enumerate(self._new_ids(input_ids)):
            self._take(row, token_ids)
        forced = [
            row for row, ended in enumerate(self._ended) if self._triggered[row] and not ended
        ]
        if forced:
            scores = scores.clone()
            scores[forced] = -torch.inf
            scores[forced, self._eos_token_ids[0]] = 0.0
        for row in forced:
            self._forced.add(tuple(input_ids[row, self._prompt_length :].tolist()))
        return scores

    def ended(self, generated: Sequence[int]) -> bool:
        """Return whether the guard ended the answer `generated`, which lacks the final id.

        Verdicts depend on an answer's ids alone, so this holds for any row and any beam.
        """
        return tuple(generated) in self._forced

    def _new_ids(self, input_ids: torch.Tensor) -> list[list[int]]:
        """Return the new ids of each row since the last call; all ids if rows were reordered."""
        seen = self._seen
        if seen is None or not torch.equal(seen, input_ids[:, : seen.shape[1]]):
            rows = len(input_ids)
            self._guards = [self._make_guard() for _ in range(rows)]
            self._ended, self._triggered = [False] * rows, [False] * rows
            taken = self._prompt_length
        else:
            taken = seen.shape[1]
        self._seen = input_ids
        new_ids: list[list[int]] = input_ids[:, taken:].tolist()
        return new_ids

    def _take(self, row: int, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self._ended[row] |= token_id in self._eos_token_ids
            self._triggered[row] = self._guards[row].push(token_id)
