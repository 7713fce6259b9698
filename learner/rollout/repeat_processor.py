"""The repeat guard inside transformers' `generate`, as inside vLLM (REP-03)."""

from collections.abc import Sequence
from functools import partial

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig, entry_token_ids


class HfRepeatProcessor(LogitsProcessor):
    """A logits processor that ends rows that repeat themselves, in one `generate` call.

    A row that triggers can only continue with the first of `eos_token_ids`. Other rows keep their
    scores. One object serves one call.

    prompt_length: width of the prompts, padding included; only the ids behind it are guarded.
    eos_token_ids: the ids that end a row; nothing is forced behind them.
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
        self._guards: list[RepeatGuard | None] = []  # None for a row that has ended
        self._forced: set[tuple[int, ...]] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change the scores. input_ids: rows x ids so far; scores: rows x vocabulary."""
        for row, token_ids in enumerate(self._new_ids(input_ids)):
            self._take(row, token_ids)
        forced = [row for row, guard in enumerate(self._guards) if guard and guard.triggered]
        if forced:
            scores = scores.clone()
            scores[forced] = -torch.inf
            scores[forced, self._eos_token_ids[0]] = 0.0
            self._forced.update(map(tuple, input_ids[forced, self._prompt_length :].tolist()))
        return scores

    def ended(self, generated: Sequence[int]) -> bool:
        """Return whether the guard ended the answer `generated`, which lacks the final id.

        Verdicts depend on an answer's ids alone, so this holds for any row and any beam.
        """
        return tuple(generated) in self._forced

    def _new_ids(self, input_ids: torch.Tensor) -> list[list[int]]:
        """Return the new ids of each row since the last call; all ids if rows were reordered."""
        seen, taken = self._seen, self._prompt_length
        if seen is not None and torch.equal(seen, input_ids[:, : seen.shape[1]]):
            taken = seen.shape[1]
        else:
            self._guards = [self._make_guard() for _ in input_ids]
        self._seen = input_ids
        new_ids: list[list[int]] = input_ids[:, taken:].tolist()
        return new_ids

    def _take(self, row: int, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if token_id in self._eos_token_ids:
                self._guards[row] = None
            if guard := self._guards[row]:
                guard.push(token_id)
