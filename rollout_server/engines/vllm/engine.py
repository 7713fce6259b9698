"""One vLLM engine: its arguments, sampling, generation, sleep, phases of a weight update.

Errors of vLLM become errors of `engine_protocol`.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Coroutine, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar

from fastapi import FastAPI
from PIL import Image
from pydantic import TypeAdapter
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.params import ChatParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_server.engines.engine_protocol import (
    FIRST_VERSION,
    Aborted,
    Adapter,
    BadRequest,
    ChatGenerate,
    Completion,
    EngineDead,
    Finish,
    Load,
    Prompt,
    PromptMessage,
    Send,
    WeightPhaseFailed,
)
from rollout_server.engines.vllm.push_engine import BACKEND
from rollout_server.engines.vllm.repeat_processor import active_sentinel
from rollout_server.runtime.concurrency import cancel_when
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.repeat_config import PROCESSOR
from shared_contracts.checkpoints import ENGINE_SHARE
from shared_contracts.errors import refusal
from shared_contracts.infer import RequestConfig
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.weights import DtypeName, InitCommunicator, ParameterMeta

# Tokens of one CPU forward: about 80 prompts of 200 tokens.
CPU_BATCHED_TOKENS = 16384

# Tokens of one GPU forward; vLLM's default for an engine outside of its own server is 2,048.
GPU_BATCHED_TOKENS = 8192

# Worker extension that reads the repeat guard.
REPORT = "rollout_server.engines.vllm.repeat_processor.RepeatReport"


def engine_args(settings: ServerSettings, index: int) -> AsyncEngineArgs:
    common: dict[str, Any] = {
        "model": str(settings.checkpoint),
        # The name in `/v1/models`.
        "served_model_name": str(settings.model),
        "dtype": settings.dtype,
        # Code in a checkpoint is never run.
        "trust_remote_code": False,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        # Waiting requests are ordered by turn (`serving.infer`), not by arrival.
        "scheduling_policy": "priority",
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": settings.enable_prefix_caching,
        # The two ends of this cache would disagree after rendered requests of a refused call.
        "mm_processor_cache_gb": 0,
        # For OpenAI's routes: only data URLs, no host is allowed.
        "allowed_media_domains": ["none.invalid"],
        "limit_mm_per_prompt": {"image": settings.max_images_per_request, "video": 0},
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        # One adapter in a batch, in the type of the model's weights. vLLM keeps the previous one
        # for running sequences.
        "enable_lora": settings.enable_lora,
        "max_loras": 1,
        "max_cpu_loras": 2,
        "max_lora_rank": settings.max_lora_rank,
        "lora_dtype": "auto",
        # Adapters may include the vision tower.
        "enable_tower_connector_lora": settings.enable_lora,
    }
    if settings.repeat_terminate.enabled:
        common |= {"logits_processors": [PROCESSOR], "worker_extension_cls": REPORT}
    extra = _cpu_args(settings) if settings.device == "cpu" else _gpu_args(settings, index)
    return AsyncEngineArgs(**common | extra)


def _cpu_args(settings: ServerSettings) -> dict[str, Any]:
    tokens = settings.max_num_batched_tokens
    if tokens is None and settings.max_model_len is not None:
        tokens = max(CPU_BATCHED_TOKENS, settings.max_model_len)
    return {
        "max_num_batched_tokens": tokens,
        "dtype": _cpu_dtype(settings),
        # Seeded requests and chunked prefill together kill the CPU engine.
        "enable_chunked_prefill": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
        # `uni` runs the worker in the engine process.
        "distributed_executor_backend": settings.distributed_executor_backend
        or ("uni" if settings.tensor_parallel_size == 1 else "mp"),
    }


def _cpu_dtype(settings: ServerSettings) -> str:
    """Return the type; `auto` is the checkpoint's (vLLM would convert float32 to bfloat16)."""
    if settings.dtype != "auto":
        return settings.dtype
    config = json.loads((settings.checkpoint / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def _gpu_args(settings: ServerSettings, index: int) -> dict[str, Any]:
    by_ray = settings.distributed_executor_backend == "ray"
    return {
        "device_ids": None if by_ray else settings.gpus_of(index),
        "distributed_executor_backend": settings.distributed_executor_backend,
        "gpu_memory_utilization": settings.gpu_memory_utilization or ENGINE_SHARE,
        # A special allocator, which can release memory.
        "enable_sleep_mode": settings.share_gpus,
        "max_num_batched_tokens": settings.max_num_batched_tokens
        or max(GPU_BATCHED_TOKENS, settings.max_num_seqs),
    }


def sampling_params(
    config: RequestConfig, seed: int | None, max_tokens: int, sentinel: int | None = None
) -> SamplingParams:
    """Return all sampling parameters, so that none comes from the checkpoint.

    sentinel: stop id of the repeat guard. Raises as `Engine.check_sampling`.
    """
    try:
        return SamplingParams(
            n=config.n,
            max_tokens=max_tokens,
            temperature=config.temperature or 0.0,
            top_p=config.top_p if config.top_p is not None else 1.0,
            top_k=max(config.top_k or 0, 0),
            min_p=config.min_p or 0.0,
            repetition_penalty=config.repetition_penalty or 1.0,
            presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty,
            stop=config.stop or [],
            stop_token_ids=None if sentinel is None else [sentinel],
            seed=seed,
            # 0: of the chosen token only. vLLM's default mode is `raw_logprobs`.
            logprobs=0 if config.logprobs else None,
            # Required for stop strings; coordinate tokens may be special tokens.
            detokenize=bool(config.stop),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (VLLMClientError, ValueError) as error:
        raise refusal("invalid-request", str(error), "request_config") from error


T = TypeVar("T")

# vLLM's tags of releasable memory.
WEIGHTS, KV_CACHE = "weights", "kv_cache"

_FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length"}


class VllmEngine:
    """The implementation of `engine_protocol.Engine`, which describes the methods."""

    def __init__(self, llm: AsyncLLM, index: int, guard: RepeatTerminateConfig) -> None:
        self._llm = llm
        self.max_model_len = int(llm.model_config.max_model_len)
        dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self.dtype = TypeAdapter[DtypeName](DtypeName).validate_python(dtype)
        self._guard = guard
        self._sentinel: int | None = None  # of an active guard
        self._adapter: Adapter | None = None  # of new sequences
        self.holds_checkpoint = True
        self.index = index
        self.load = Load()
        self.weights_version = FIRST_VERSION
        self._last_sign = time.monotonic()
        self._phases = 0
        self._given_up = asyncio.Event()
        self.asleep = False
        self._released: set[str] = set()  # of WEIGHTS and KV_CACHE

    @classmethod
    def build(cls, settings: ServerSettings, index: int) -> "VllmEngine":
        config = engine_args(settings, index).create_engine_config()
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        if settings.openai:  # seconds of imports, in this thread
            import_module("rollout_server.engines.vllm.openai_app")
        return cls(llm, index, settings.repeat_terminate)

    @property
    def alive(self) -> bool:
        return not (self._llm.errored or self._given_up.is_set())

    @property
    def heartbeat_age_s(self) -> float:
        # Weight phases block the engine's loop and have their own deadlines.
        return 0.0 if self._phases else time.monotonic() - self._last_sign

    async def heartbeat(self) -> None:
        """Call the engine's loop; a hung engine does not answer."""
        await self._reached(self._llm.is_paused())
        self._last_sign = time.monotonic()

    def declare_dead(self) -> None:
        self._given_up.set()

    async def render(self, messages: list[PromptMessage], images: list[Image.Image]) -> Prompt:
        text = "\n".join(part or "" for message in messages for part in message.parts)
        if found := [token for token in self._control_tokens if token in text]:
            refused = f"the text spells out {found[0]}, which the chat template writes"
            raise BadRequest("messages", refused)
        if self._given_up.is_set():
            raise EngineDead(f"replica {self.index} is dead")
        conversation = _vllm_messages(messages, images)
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        rendered = self._llm.renderer.render_chat_async([conversation], params)
        try:
            _, inputs = await self._reached(rendered)
        except (VLLMClientError, ValueError) as error:
            raise BadRequest("messages", str(error)) from error
        return Prompt(inputs[0], list(inputs[0]["prompt_token_ids"]))

    @cached_property
    def _control_tokens(self) -> list[str]:
        tokenizer: Any = self._llm.get_tokenizer()  # of transformers
        added = tokenizer.added_tokens_decoder.values()
        return [str(token) for token in added if token.special]

    def check_sampling(self, config: RequestConfig) -> None:
        sampling_params(config, config.seed, max_tokens=1)

    async def generate(
        self,
        prompt: Prompt,
        config: RequestConfig,
        seed: int | None,
        max_tokens: int,
        request_id: str,
        turn: int,
    ) -> list[Completion]:
        sampling = sampling_params(config, seed, max_tokens, self._sentinel)
        adapter, finals = self._adapter, list[RequestOutput]()
        try:
            await self._run(prompt.engine_input, sampling, request_id, turn, finals.append)
        except VLLMClientError as error:
            raise BadRequest("messages", str(error)) from error
        (final,) = finals
        return [self._completion(output, adapter) for output in final.outputs]

    async def openai_app(self, generate_chat: ChatGenerate) -> FastAPI:
        from rollout_server.engines.vllm.openai_app import openai_app  # imported by `build`

        return await openai_app(self._llm, generate_chat)

    async def stream(self, prompt: Any, sampling: SamplingParams, turn: int, send: Send) -> None:
        # The text is that of `/infer/`.
        sampling.skip_special_tokens = sampling.spaces_between_special_tokens = False
        if self._sentinel is not None:
            sampling.stop_token_ids = [*(sampling.stop_token_ids or []), self._sentinel]
        await self._run(prompt, sampling, uuid.uuid4().hex, turn, send)

    async def _run(
        self, prompt: Any, sampling: SamplingParams, request_id: str, turn: int, send: Send
    ) -> None:
        """Raises EngineDead, Aborted, and vLLM's errors for a bad request."""
        adapter = self._adapter  # kept until the end of the call
        lora = None if adapter is None else _lora(adapter)
        outputs = self._llm.generate(prompt, sampling, request_id, lora_request=lora, priority=turn)

        async def send_all() -> None:
            async for output in outputs:
                if any(choice.finish_reason == "abort" for choice in output.outputs):
                    raise Aborted(f"replica {self.index} ended a sequence: abort")
                send(output)

        await self._reached(send_all())

    def _completion(self, output: CompletionOutput, adapter: Adapter | None) -> Completion:
        finish = _FINISHES.get(output.finish_reason)
        if finish is None:
            raise Aborted(f"replica {self.index} ended a sequence: {output.finish_reason}")
        token_ids, text, sentinel = list(output.token_ids), output.text, self._sentinel
        # A stop string is part of the text; any other stop is one final token.
        if not isinstance(output.stop_reason, str):
            if finish == "stop":
                token_ids.pop()
            # vLLM's text lacks incomplete characters at its end.
            text = str(self._llm.get_tokenizer().decode(token_ids, skip_special_tokens=False))
        labels = [span.version for span in output.weight_versions or []]
        versions = [FIRST_VERSION if label == "default" else int(label) for label in labels]
        if adapter is not None:  # a sequence keeps its adapter while a newer one is loaded
            versions = [adapter.version]
        return Completion(
            index=output.index,
            text=text,
            token_ids=token_ids,
            finish=finish,
            repeat_terminated=sentinel is not None and output.stop_reason == sentinel,
            weights_version=(versions[0], versions[-1]),
            logprobs=None if output.logprobs is None else _logprobs(output, len(token_ids)),
        )

    async def pause(self) -> None:
        await self._reached(self._llm.pause_generation(mode="wait", clear_cache=True))

    async def resume(self) -> None:
        await self._wake_up(WEIGHTS, KV_CACHE)
        await self._reached(self._llm.resume_generation())
        self.asleep = False

    async def sleep(self) -> None:
        self.asleep = True
        try:
            await self.pause()
        except BaseException:
            await self.resume()
            raise
        if not self._released:
            # Level 2 would drop tensors that are neither buffers nor part of a push, such as those
            # of Qwen3-VL's deepstack and of LoRA layers. `abort` ends the waiting requests.
            await self._move_memory(self._llm.sleep(level=1, mode="abort"))
            self._released = {WEIGHTS, KV_CACHE}

    async def _wake_up(self, *tags: str) -> None:
        if due := [tag for tag in tags if tag in self._released]:
            await self._move_memory(self._llm.wake_up(due))
            self._released.difference_update(due)

    async def _move_memory(self, call: Coroutine[Any, Any, object]) -> None:
        """Raises EngineDead: a failure ends the engine."""
        try:
            await self._worker_call(call)
        except BaseException as error:
            self.declare_dead()
            if isinstance(error, WeightPhaseFailed):
                found = f"replica {self.index} did not move its memory: {error.__cause__}"
                raise EngineDead(found) from error
            raise

    @property
    def guard_active(self) -> bool:
        return self._sentinel is not None

    async def prepare(self) -> None:
        if self._guard.enabled:
            reports = await self._reached(self._llm.collective_rpc("repeat_guard"))
            self._sentinel = active_sentinel(self._guard, reports)

    async def join_group(self, init: InitCommunicator, first_worker: int) -> None:
        info = {"group": init.model_dump(), "first_worker": first_worker}
        request = WeightTransferInitRequest(info)
        await self._worker_call(self._llm.init_weight_transfer_engine(request))

    async def leave_group(self) -> None:
        await self._worker_call(self._llm.shutdown_weight_transfer_engine())

    async def start_weight_update(self) -> None:
        await self._wake_up(WEIGHTS)
        await self._worker_call(self._llm.start_weight_update())

    async def update_weights(self, parameters: Sequence[ParameterMeta]) -> None:
        self.holds_checkpoint = False
        plain = [parameter.model_dump() for parameter in parameters]
        request = WeightTransferUpdateRequest({"parameters": plain})
        await self._worker_call(self._llm.update_weights(request))

    async def finish_weight_update(self, version: int) -> None:
        await self._worker_call(self._llm.finish_weight_update())
        await self._reached(self._llm.reset_mm_cache())
        await self._reached(self._llm.reset_encoder_cache())
        if not await self._reached(self._llm.reset_prefix_cache()):
            raise WeightPhaseFailed(f"replica {self.index}: the prefix cache is still in use")
        await self._reached(self._llm.update_weight_version(str(version)))
        self._adapter = None
        self.weights_version = version

    async def load_adapter(self, adapter: Adapter) -> None:
        if self.asleep:
            await self.resume()
        # In place: a failed push may have loaded an adapter of this version.
        await self._worker_call(self._llm.add_lora(_lora(adapter, load_inplace=True)))

    async def use_adapter(self, adapter: Adapter) -> None:
        self._adapter, self.weights_version = adapter, adapter.version

    async def _worker_call(self, call: Coroutine[Any, Any, object]) -> None:
        """Raises WeightPhaseFailed or EngineDead."""
        self._phases += 1
        try:
            await self._reached(call)
        except EngineDead:
            raise
        except Exception as error:  # vLLM raises many types
            raise WeightPhaseFailed(f"replica {self.index}: {error}") from error
        finally:
            self._phases -= 1
            self._last_sign = time.monotonic()

    def shutdown(self) -> None:
        if not self._given_up.is_set():
            # vLLM's output loop would log the shutdown as an error, with a traceback.
            logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
        self._llm.shutdown()

    async def _reached(self, call: Coroutine[Any, Any, T]) -> T:
        dead = EngineDead(f"replica {self.index} is dead")
        try:
            return await cancel_when(self._given_up.wait(), call, dead)
        except Exception as error:
            if error is dead or not self._llm.errored:
                raise
            raise dead from error


def _lora(adapter: Adapter, *, load_inplace: bool = False) -> LoRARequest:
    name, folder = f"version-{adapter.version}", str(adapter.folder)
    return LoRARequest(name, adapter.version, folder, load_inplace=load_inplace)


def _vllm_messages(messages: list[PromptMessage], images: list[Image.Image]) -> list[Any]:
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


def _logprobs(output: CompletionOutput, length: int) -> list[float]:
    """Return the log-probabilities of the first `length` tokens, in nats."""
    logprobs: Any = output.logprobs
    return [logprobs[place][output.token_ids[place]].logprob for place in range(length)]
