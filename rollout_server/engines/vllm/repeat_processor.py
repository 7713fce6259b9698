"""The repeat guard inside vLLM: logits processors of both model runners (REP-03, REP-04).

RepeatProcessor      for V1, around a `RepeatGuard` for each sequence
RepeatProcessorV2    for V2, around one `GuardRows`: what was sampled stays on the device

    rollout-server      activates it when `repeat_terminate.enabled` is true
    vllm serve --logits-processors rollout_server.engines.vllm.repeat_processor:RepeatProcessor
    LLM(logits_processors=["rollout_server.engines.vllm.repeat_processor:RepeatProcessor"])

Its settings come from the environment (`repeat_config`); a request may bring its own in
`SamplingParams.extra_args["repeat_terminate"]`, or False to be left alone.

A sequence that triggers can only continue with the sentinel where that is among its stop
ids, and with the end-of-sequence token where it is not. The sentinel is an id that is hidden
from every sequence and forced on one that repeats itself, so a sequence that stopped at it was
ended by the guard and by nothing else (REP-05).
"""

import os
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase
from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from rollout_server.engines.vllm.repeat_rows import GuardRows
from rollout_server.settings.repeat_config import (
    EXTRA_ARG,
    repeat_config_from_environment,
    validated,
)
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import (
    RepeatGuard,
    RepeatTerminateConfig,
    object_key_token_ids,
)

# Special tokens of the Qwen family that neither an answer nor a conversation uses, the
# least useful first.
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
    """An id below `vocab_size` (the width of the logits) that no answer contains.

    The highest one the tokenizer has no token for, as padded embeddings have; else the
    first of `RESERVED_TOKENS` that the chat template does not write and that is neither
    the end of a sequence nor padding. None where there is none.
    """
    vocab = tokenizer.get_vocab()
    unused = set(range(vocab_size)).difference(vocab.values())
    if unused:
        return max(unused)
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    template = str(tokenizer.chat_template)
    for token in RESERVED_TOKENS:
        token_id = vocab.get(token)
        if token_id is not None and token_id not in ends and token not in template:
            return token_id
    return None


class _Guarding:
    """What both processors read when they are built.

    config: of the sequences that bring none.
    sentinel: see `choose_sentinel`; None where the vocabulary has none.
    """

    def __init__(self, model_config: ModelConfig) -> None:
        tokenizer = _tokenizer(model_config)
        self.config = repeat_config_from_environment(os.environ) or RepeatTerminateConfig()
        self.sentinel = choose_sentinel(tokenizer, model_config.get_vocab_size())
        self._eos_token_id = _eos_token_id(model_config, tokenizer)
        self._object_key = object_key_token_ids(
            lambda text: tokenizer.encode(text, add_special_tokens=False)
        )

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises VLLMValidationError for settings of a request that are none."""
        try:
            _own_config(sampling_params)
        except ContractError as error:
            raise VLLMValidationError(str(error), parameter="extra_args") from error

    def _config_of(self, params: SamplingParams) -> RepeatTerminateConfig:
        own = _own_config(params)
        return self.config if own is None else own

    def _last_id_of(self, params: SamplingParams) -> int:
        """What the sequence can only continue with once it has triggered."""
        if self.sentinel is not None and self.sentinel in (params.stop_token_ids or ()):
            return self.sentinel
        return self._eos_token_id if params.eos_token_id is None else params.eos_token_id


# Steps a sequence whose guard has slack may pass without being looked at.
LONGEST_REST = 32


class RepeatProcessor(_Guarding, LogitsProcessor):
    """One guard per sequence; rows of `logits` follow the persistent batch."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config.model_config)
        self._device = device
        self._pin_memory = is_pin_memory
        self._rows: dict[int, _Sequence] = {}
        self._guarded: list[tuple[int, _Sequence]] = []
        # Rows where the sentinel is hidden: all of them, these, or none.
        self._hidden: slice | torch.Tensor | None = None

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch; what was sampled is taken in `apply`, when it is known.

        Under asynchronous scheduling the output ids still end in -1 here.
        """
        if batch_update is None:
            return
        rows = self._rows
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, _, output_ids in batch_update.added:
            rows[row] = self._sequence(row, params, output_ids)
        for source, target, direction in batch_update.moved:
            moved, replaced = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                rows[source] = replaced
        self._guarded = [(row, each) for row, each in rows.items() if each.guarded]
        self._hidden = self._rows_to_hide()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: rows x vocabulary, changed in place."""
        if self._hidden is not None:
            logits[self._hidden, self.sentinel] = -torch.inf
        for row, sequence in self._guarded:
            if sequence.repeats():
                logits[row] = -torch.inf
                logits[row, sequence.last_id] = 0.0
        return logits

    def _sequence(self, row: int, params: SamplingParams, output_ids: list[int]) -> "_Sequence":
        config = self._config_of(params)
        make_guard = partial(RepeatGuard, config, self._object_key)
        rest = row % LONGEST_REST
        return _Sequence(make_guard, output_ids, self._last_id_of(params), config.enabled, rest)

    def _rows_to_hide(self) -> slice | torch.Tensor | None:
        rows = [row for row, each in self._rows.items() if each.last_id == self.sentinel]
        if not rows:
            return None
        if len(rows) == len(self._rows):
            return slice(None)
        chosen = torch.tensor(rows, pin_memory=self._pin_memory)
        return chosen.to(self._device, non_blocking=True)


class _Sequence:
    """A guard, and how much of its sequence it has taken.

    The guard need not look at every step: while it has slack the ids wait, and are taken
    together. Sequences that begin together begin with different rests (`first_rest`), so
    that they are not all looked at in the same step ever after.

    output_ids: vLLM's own list, which grows as the sequence does. It may end in -1, for
        ids that are not known yet, and ids may be discarded from its end.
    last_id: what the sequence can only continue with once it has triggered.
    guarded: whether it can trigger.
    """

    __slots__ = (
        "_due",
        "_guard",
        "_make_guard",
        "_output_ids",
        "_rest",
        "_taken",
        "_triggered",
        "guarded",
        "last_id",
    )

    def __init__(
        self,
        make_guard: Callable[[], RepeatGuard],
        output_ids: list[int],
        last_id: int,
        guarded: bool,
        first_rest: int,
    ) -> None:
        self.last_id = last_id
        self.guarded = guarded
        self._make_guard = make_guard
        self._guard = make_guard()
        self._output_ids = output_ids
        self._rest = first_rest
        self._taken = 0
        self._due = 0
        self._triggered = False

    def repeats(self) -> bool:
        """Whether the sequence, as far as it is known now, has triggered."""
        if not self._taken <= len(self._output_ids) < self._due:
            self._look()
        return self._triggered

    def _look(self) -> None:
        """Take every known id: those since the last look, or all of them after a discard."""
        if len(self._output_ids) < self._taken:
            self._guard, self._taken, self._triggered = self._make_guard(), 0, False
        push = self._guard.push
        for token_id in self._output_ids[self._taken :]:
            if token_id < 0:
                break
            self._triggered = push(token_id)
            self._taken += 1
        self._due = self._taken + 1 + min(self._guard.slack, self._rest)
        self._rest = LONGEST_REST


# The logit of the only id that may follow; others keep theirs. As vLLM ends a budget of thoughts.
FORCED = 1.0e9


class RepeatProcessorV2(_Guarding, LogitsProcessorV2):
    """One state for all slots of the batch, on the device of the logits.

    A step takes the same operations for any number of sequences, and none waits for the device.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        super().__init__(vllm_config.model_config)
        _require_one_row_per_sequence(vllm_config)
        slots, device = req_states.max_num_reqs, req_states.device
        self._requests = req_states
        self._rows = GuardRows(slots, req_states.all_token_ids.gpu, self._object_key)
        self._last_ids = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        # What `apply_staged_writes` writes: last ids, by slot.
        self._begun: dict[int, int] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Begin with what the runner knows of the slot: a prompt, or more after a preemption."""
        config, last_id = self._config_of(sampling_params), self._last_id_of(sampling_params)
        prompt, known = (
            int(length.np[req_idx])
            for length in (self._requests.prompt_len, self._requests.prefill_len)
        )
        self._rows.begin(req_idx, config, prompt, known)
        self._begun[req_idx] = last_id
        return config.enabled or last_id == self.sentinel

    def apply_staged_writes(self) -> None:
        self._rows.flush()
        if self._begun:
            slots, last_ids = self._rows.to_device([list(self._begun), list(self._begun.values())])
            self._last_ids[slots, 0] = last_ids
            self._begun.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """logits: rows x vocabulary, changed in place, in one column of each row."""
        slots = ctx.expanded_idx_mapping
        triggered = self._rows.take(slots, ctx.pos)[:, None]
        last_ids = self._last_ids.index_select(0, slots)
        hidden = last_ids == (-1 if self.sentinel is None else self.sentinel)
        kept = logits.gather(1, last_ids).masked_fill_(hidden, -torch.inf)
        return logits.scatter_(1, last_ids, kept.masked_fill_(triggered, FORCED))


def _require_one_row_per_sequence(config: VllmConfig) -> None:
    """The state takes one id of every sequence in each step, on every worker."""
    if config.speculative_config is not None:
        raise ContractError(
            "speculative_config", "the repeat guard does not follow drafts", "Leave it out"
        )
    if config.parallel_config.enable_batch_sharded_sampling:
        raise ContractError(
            "enable_batch_sharded_sampling",
            "the repeat guard needs all sequences on each worker",
            "Leave it out",
        )


def _own_config(params: SamplingParams) -> RepeatTerminateConfig | None:
    """What a request says about itself; None where it says nothing."""
    own = (params.extra_args or {}).get(EXTRA_ARG)
    if own is None:
        return None
    return RepeatTerminateConfig() if own is False else validated(EXTRA_ARG, own)


def _tokenizer(model_config: ModelConfig) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase | None = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        raise ContractError(
            "skip_tokenizer_init", "the repeat guard needs the tokenizer", "Leave it out"
        )
    return tokenizer


def _eos_token_id(model_config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """For requests that carry none: those that ignore the end of a sequence."""
    configured = model_config.try_get_generation_config().get("eos_token_id")
    first = configured[0] if isinstance(configured, list) else configured
    found = first if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if found is None:
        raise ContractError(
            str(model_config.model),
            "it has no end-of-sequence token, which the repeat guard needs",
            "Name one in its tokenizer_config.json or generation_config.json",
        )
    return int(found)
