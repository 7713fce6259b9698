"""One vLLM engine.

With `engine_args` and `guard_check` all that imports vLLM in the server's own process.

    Engine.build(settings, index)     blocking: call it in a thread
    render(messages) -> Prompt        chat template, tokens, image features
    check_sampling(config)            before anything is generated
    generate(prompt, ...) -> [Completion]
    pause, weight_phase, publish, resume, abort_all
    prepare, heartbeat, declare_dead, shutdown

Errors of vLLM leave this module as those of `engine_types`.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from PIL import Image
from pydantic import TypeAdapter
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.params import ChatParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rollout_server.adapter import SERVED
from rollout_server.chat import ChatMessage
from rollout_server.engine_args import engine_args, sampling_params
from rollout_server.engine_types import (
    Aborted,
    Completion,
    EngineDead,
    Finish,
    Prompt,
    PromptRefused,
    WeightPhaseFailed,
)
from rollout_server.guard_check import EngineGuard
from rollout_server.race import unless
from rollout_server.routing import Load
from rollout_server.settings import ServerSettings
from shared_contracts.infer import RequestConfig
from shared_contracts.weights import DtypeName

T = TypeVar("T")

_FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length"}

# The version of the weights a server starts with; the learner's pushes count from 1.
FIRST_VERSION = 0


class Engine:
    """adapter: what every sequence names, whatever the weights are; None where none is served."""

    def __init__(
        self,
        llm: AsyncLLM,
        index: int,
        guard: EngineGuard | None,
        adapter: LoRARequest | None = None,
    ) -> None:
        self._llm = llm
        self._guard = guard
        self._adapter = adapter
        self.index = index
        self.load = Load()
        self.weights_version = FIRST_VERSION
        self._last_sign = time.monotonic()
        self._phases = 0
        self._given_up = asyncio.Event()

    @classmethod
    def build(cls, settings: ServerSettings, index: int) -> "Engine":
        """Start the engine process of replica `index` and load the model (seconds).

        Raises GuardInactive when the model leaves the repeat guard no sentinel.
        """
        config = engine_args(settings, index).create_engine_config()
        guard = EngineGuard.of(settings.repeat_terminate, config.model_config)
        adapter = SERVED if settings.enable_lora else None
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        return cls(llm, index, guard, adapter)

    @property
    def max_model_len(self) -> int:
        return int(self._llm.model_config.max_model_len)

    @property
    def dtype(self) -> DtypeName:
        """In which the model's weights are held."""
        name = str(self._llm.model_config.dtype).removeprefix("torch.")
        return TypeAdapter[DtypeName](DtypeName).validate_python(name)

    @property
    def alive(self) -> bool:
        return not self._llm.errored

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine's loop last answered, or a weight phase ended.

        Weight phases stop the loop and have deadlines of their own.
        """
        return 0.0 if self._phases else time.monotonic() - self._last_sign

    async def heartbeat(self) -> None:
        """Ask the engine's own loop for an answer: a hung engine gives none."""
        await self._reached(self._llm.is_paused())
        self._last_sign = time.monotonic()

    def declare_dead(self) -> None:
        """Have every call that waits for this engine raise EngineDead."""
        self._given_up.set()

    async def render(self, messages: list[ChatMessage], images: list[Image.Image]) -> Prompt:
        """Apply the model's chat template and processor.

        images: in the order of the image parts of `messages`.
        Raises PromptRefused for what the template or the processor cannot take.
        """
        conversation = _vllm_messages(messages, images)
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        try:
            _, inputs = await self._llm.renderer.render_chat_async([conversation], params)
        except (VLLMClientError, ValueError) as error:
            raise PromptRefused(str(error)) from error
        return Prompt(inputs[0], list(inputs[0]["prompt_token_ids"]))

    def check_sampling(self, config: RequestConfig) -> None:
        """Raises PromptRefused for parameters vLLM does not take."""
        sampling_params(config, config.seed, max_tokens=1)

    async def generate(
        self,
        prompt: Prompt,
        config: RequestConfig,
        seed: int | None,
        max_tokens: int,
        request_id: str,
    ) -> list[Completion]:
        """Continue `prompt` `config.n` times; cancelling the call aborts its sequences.

        Raises PromptRefused for what only the engine can tell, EngineDead and Aborted.
        """
        sampling = sampling_params(config, seed, max_tokens, self._sentinel)
        final = await self._reached(self._final(prompt.engine_input, sampling, request_id))
        return [self._completion(output) for output in final.outputs]

    async def _final(
        self, engine_input: Any, sampling: SamplingParams, request_id: str
    ) -> RequestOutput:
        outputs = self._llm.generate(engine_input, sampling, request_id, lora_request=self._adapter)
        try:
            (final,) = [output async for output in outputs]  # FINAL_ONLY yields once
        except VLLMClientError as error:
            raise PromptRefused(str(error)) from error
        return final

    @property
    def _sentinel(self) -> int | None:
        return None if self._guard is None else self._guard.sentinel

    def _completion(self, output: CompletionOutput) -> Completion:
        finish = _FINISHES.get(output.finish_reason)
        if finish is None:
            raise Aborted(f"replica {self.index} ended a sequence: {output.finish_reason}")
        token_ids, text, sentinel = list(output.token_ids), output.text, self._sentinel
        # A stop string ends inside the text; anything else that stops is one last token.
        if not isinstance(output.stop_reason, str):
            if finish == "stop":
                token_ids.pop()
            text = self._decode(token_ids)
        versions = [_version(span.version) for span in output.weight_versions or []]
        return Completion(
            index=output.index,
            text=text,
            token_ids=token_ids,
            finish=finish,
            repeat_terminated=sentinel is not None and output.stop_reason == sentinel,
            weights_version=(versions[0], versions[-1]),
        )

    def _decode(self, token_ids: list[int]) -> str:
        """All of the text: vLLM's own leaves out bytes that do not end a character yet."""
        tokenizer = self._llm.get_tokenizer()
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    async def pause(self) -> None:
        """Let running sequences finish, hold new ones, drop what old weights cached."""
        await self._reached(self._llm.pause_generation(mode="wait", clear_cache=True))

    async def abort_all(self) -> None:
        """Stay paused and end every sequence that still waits."""
        await self._reached(self._llm.pause_generation(mode="abort", clear_cache=True))

    async def resume(self) -> None:
        await self._reached(self._llm.resume_generation())

    @property
    def guard_active(self) -> bool:
        """Whether the repeat guard is asked for and proven."""
        return self._guard is not None and self._guard.proven

    async def prepare(self) -> None:
        """What comes before the first sequence; the engine shows that its repeat guard works.

        Raises WeightPhaseFailed, GuardInactive and EngineDead.
        """
        if self._adapter is not None:
            await self.weight_phase("serve_no_adapter")
        if self._guard is not None:
            await self._reached(self._guard.prove(self._llm))

    async def weight_phase(self, name: str, **arguments: Any) -> list[Any]:
        """Run a phase of `worker_extension` on each worker; what each returned.

        Raises WeightPhaseFailed with what every failing worker says.
        """
        self._phases += 1
        try:
            answers = await self._reached(
                self._llm.collective_rpc("weight_phase", args=(name, arguments))
            )
        finally:
            self._phases -= 1
            self._last_sign = time.monotonic()
        failures = [failure for failure, _ in answers if failure is not None]
        if failures:
            raise WeightPhaseFailed(f"replica {self.index}, {'; '.join(failures)}")
        return [value for _, value in answers]

    async def publish(self, version: int) -> None:
        """Drop every cache of the old weights and stamp what follows with `version`."""
        await self._reached(self._llm.reset_mm_cache())
        await self._reached(self._llm.reset_encoder_cache())
        if not await self._reached(self._llm.reset_prefix_cache()):
            raise WeightPhaseFailed(f"replica {self.index}: the prefix cache is still in use")
        await self._reached(self._llm.update_weight_version(str(version)))
        self.weights_version = version

    def shutdown(self) -> None:
        """End the engine's processes (blocking, seconds at most)."""
        if not self._given_up.is_set():
            # vLLM's output loop would report the end we ask for as a death, with a traceback.
            logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
        self._llm.shutdown()

    async def _reached(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await unless(self._given_up.wait(), call, EngineDeadError())
        except EngineDeadError as error:
            raise EngineDead(f"replica {self.index} is dead") from error


def _vllm_messages(messages: list[ChatMessage], images: list[Image.Image]) -> list[Any]:
    left = iter(images)
    return [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": part}
                if part is not None
                else {"type": "image_pil", "image_pil": next(left)}
                for part in message.parts
            ],
        }
        for message in messages
    ]


def _version(label: str) -> int:
    """vLLM calls the weights of the checkpoint "default" until told otherwise."""
    return FIRST_VERSION if label == "default" else int(label)
