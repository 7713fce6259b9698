"""The repeat guard of one engine, which proves itself before the first answer (REP-06).

It takes two sequences of one single token, side by side: a rigged one, which the guard must end,
and a control, which it must not.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from vllm.config import ModelConfig
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_server.engines.engine_protocol import GuardInactive
from rollout_server.engines.vllm.repeat_processor import (
    RESERVED_TOKENS,
    choose_sentinel,
    entry_ids_of,
)
from rollout_server.settings.repeat_config import EXTRA_ARG
from shared_contracts.repeat_guard import RepeatTerminateConfig

# Tokens after which the rigged sequence must end, and length of the control.
RIGGED_RUN, CONTROL_LENGTH = 4, 8


@dataclass
class EngineGuard:
    """config: in effect for every sequence. proven: `prove` has succeeded.

    entry: the ids of an entry, in the answer format of `config`.
    """

    config: RepeatTerminateConfig
    sentinel: int
    entry: list[int]
    proven: bool = False

    @classmethod
    def of(cls, config: RepeatTerminateConfig, model_config: ModelConfig) -> "EngineGuard | None":
        """None where no guard is asked for; GuardInactive where the model has no sentinel."""
        if not config.enabled:
            return None
        tokenizer = cached_tokenizer_from_config(model_config)
        sentinel = choose_sentinel(tokenizer, model_config.get_vocab_size())
        if sentinel is None:
            raise _inactive(
                "its vocabulary has no id left for the sentinel: pad the embeddings beyond the "
                f"tokenizer, or add one of {', '.join(RESERVED_TOKENS)} to it"
            )
        return cls(config, sentinel, entry_ids_of(tokenizer, config))

    async def prove(self, llm: AsyncLLM) -> None:
        """Raises GuardInactive, which says what is missing."""
        await self._require_same_settings(llm)
        rule = RepeatTerminateConfig(enabled=True, max_consecutive_token_repeats=RIGGED_RUN)
        rigged, control = await asyncio.gather(
            self._repeat_one_token(llm, "rigged", rule.model_dump()),
            self._repeat_one_token(llm, "control", False),
        )
        if rigged.stop_reason != self.sentinel or len(rigged.token_ids) != RIGGED_RUN + 1:
            raise _inactive(f"a sequence that repeats one token was not ended ({rigged})")
        if control.finish_reason != "length":
            raise _inactive(f"a sequence that is not guarded was ended ({control})")
        self.proven = True

    async def _require_same_settings(self, llm: AsyncLLM) -> None:
        asked = {
            "config": self.config.model_dump(),
            "sentinel": self.sentinel,
            "entry": self.entry,
        }
        for rank, found in enumerate(await llm.collective_rpc("repeat_guard")):
            if found is None:
                raise _inactive(f"worker {rank} has no such logits processor")
            if found != asked:
                raise _inactive(f"worker {rank} has {found} instead of {asked}")

    async def _repeat_one_token(
        self, llm: AsyncLLM, name: str, own_settings: dict[str, Any] | bool
    ) -> CompletionOutput:
        token_ids = llm.get_tokenizer().encode("a", add_special_tokens=False)[:1]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=CONTROL_LENGTH,
            allowed_token_ids=token_ids,
            stop_token_ids=[self.sentinel],
            extra_args={EXTRA_ARG: own_settings},
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=token_ids)
        (rendered,) = await llm.renderer.render_cmpl_async([prompt])
        outputs = llm.generate(rendered, sampling, f"repeat-guard-{name}")
        (final,) = [output async for output in outputs]  # FINAL_ONLY yields once
        return final.outputs[0]


def _inactive(found: str) -> GuardInactive:
    return GuardInactive(f"it is enabled, and the guard does not work in the engine: {found}")
