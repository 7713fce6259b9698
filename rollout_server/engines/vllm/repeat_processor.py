"""The repeat guard as a logits processor of vLLM's V1 model runner (REP-03 to REP-06).

    rollout-server serve    attaches it if `repeat_terminate.enabled` is true
    vllm serve              --logits-processors MODULE:RepeatProcessor (this module)
    swift rollout           --external_plugins swift_plugin.py (beside this file)

Its settings are read from the environment (`repeat_config`).

After a trigger, the only possible next token is the sentinel if that is among the stop ids, else
the end-of-sequence token. The sentinel is an id that no answer contains. While a sequence of the
batch has it as a stop id, only the guard can produce it. So the guard ended a sequence exactly if
the sequence stopped at the sentinel.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

from rollout_server.settings.repeat_config import ACTIVATION, repeat_config_from_environment
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig, entry_token_ids

# Special tokens of the Qwen family that neither answers nor conversations use, least useful first.
RESERVED_TOKENS = (
    "<|fim_pad|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|video_pad|>",
)


def choose_sentinel(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int | None:
    """Return an id below `vocab_size` (the width of the logits) that no answer contains, or None.

    This is the highest id without a token (padded embeddings have some), else the first of
    `RESERVED_TOKENS` that is not in the chat template and is no EOS, BOS or padding token.
    """
    vocab = tokenizer.get_vocab()
    if unused := set(range(vocab_size)).difference(vocab.values()):
        return max(unused)
    used = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    template = str(tokenizer.chat_template)
    free = (vocab[token] for token in RESERVED_TOKENS if token in vocab and token not in template)
    return next((token_id for token_id in free if token_id not in used), None)


class RepeatProcessor(LogitsProcessor):
    """One guard per sequence; the rows of the logits follow vLLM's persistent batch.

    built: the processor of this process; vLLM builds one per worker.
    """

    built: ClassVar["RepeatProcessor | None"] = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model.tokenizer,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
        )
        if tokenizer.eos_token_id is None:
            found = "it has no end-of-sequence token, which the repeat guard needs"
            raise ContractError(str(model.tokenizer), found, "Name one in tokenizer_config.json")
        self.config = repeat_config_from_environment(os.environ) or RepeatTerminateConfig()
        self.sentinel = choose_sentinel(tokenizer, model.get_vocab_size())
        encode = partial(tokenizer.encode, add_special_tokens=False)
        entry = entry_token_ids(encode, self.config.answer_format)
        self._make_guard = partial(RepeatGuard, self.config, entry)
        self._eos_token_id = tokenizer.eos_token_id
        self._rows: dict[int, _Sequence] = {}
        self._hide_sentinel = False
        RepeatProcessor.built = self

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Update the rows from vLLM's `BatchUpdate`; None: no change.

        `apply` reads the ids, because asynchronous scheduling writes them later.
        """
        if batch_update is None:
            return
        rows = self._rows
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, _, output_ids in batch_update.added:
            rows[row] = self._new_sequence(params, output_ids)
        for source, target, direction in batch_update.moved:
            moved, other = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if other is not None and direction.name == "SWAP":
                rows[source] = other
        self._hide_sentinel = self.sentinel in {sequence.last_id for sequence in rows.values()}

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Force the last token of triggered sequences. logits: (rows, vocabulary), in place."""
        if self._hide_sentinel:
            logits[:, self.sentinel] = -torch.inf
        for row, sequence in self._rows.items():
            if sequence.has_triggered():
                logits[row] = -torch.inf
                logits[row, sequence.last_id] = 0.0
        return logits

    def _new_sequence(self, params: SamplingParams, output_ids: list[int]) -> "_Sequence":
        # params.eos_token_id is None if the request ignores the end of a sequence.
        eos = self._eos_token_id if params.eos_token_id is None else params.eos_token_id
        stops_at_sentinel = self.sentinel in (params.stop_token_ids or ())
        return _Sequence(self._make_guard, output_ids, self.sentinel if stops_at_sentinel else eos)


class _Sequence:
    """A guard and the number of ids that it has processed.

    output_ids: vLLM's list. vLLM appends to it, writes -1 for an id that is not known yet, and may
        discard ids from its end.
    last_id: the only possible id after a trigger.
    """

    __slots__ = ("_guard", "_make_guard", "_output_ids", "_taken", "last_id")

    def __init__(
        self, make_guard: Callable[[], RepeatGuard], output_ids: list[int], last_id: int | None
    ) -> None:
        self.last_id = last_id
        self._make_guard, self._output_ids = make_guard, output_ids
        self._guard, self._taken = make_guard(), 0

    def has_triggered(self) -> bool:
        """Process new ids, or all ids after a discard; return whether the guard triggered."""
        ids, guard, taken = self._output_ids, self._guard, self._taken
        if len(ids) < taken:
            guard, taken = self._make_guard(), 0
            self._guard = guard
        while taken < len(ids) and ids[taken] >= 0:
            guard.push(ids[taken])
            taken += 1
        self._taken = taken
        return guard.triggered


class RepeatReport:
    """Worker extension that reads the guard of a running worker."""

    def repeat_guard(self) -> dict[str, Any] | None:
        """Return settings and sentinel of this worker's processor, or None."""
        processor = RepeatProcessor.built
        if processor is None:
            return None
        return {"config": processor.config.model_dump(), "sentinel": processor.sentinel}


def active_sentinel(config: RepeatTerminateConfig, reports: Sequence[dict[str, Any] | None]) -> int:
    """Return the sentinel of an engine. Raises ContractError unless all its workers use `config`.

    reports: results of `RepeatReport.repeat_guard`, one per worker.
    """
    for rank, report in enumerate(reports):
        if report is None:
            raise _inactive(f"worker {rank} has no such logits processor")
        if report["config"] != config.model_dump():
            raise _inactive(f"worker {rank} has the settings {report['config']}")
        if report["sentinel"] is None:
            raise _inactive(
                "its vocabulary has no id left for the sentinel: pad the embeddings beyond the "
                f"tokenizer, or add one of {', '.join(RESERVED_TOKENS)} to it"
            )
    (sentinel,) = {report["sentinel"] for report in reports if report is not None}
    return int(sentinel)


def _inactive(found: str) -> ContractError:
    text = f"it is enabled, and the guard does not work in the engine: {found}"
    return ContractError("repeat_terminate", text, ACTIVATION)
