"""What vLLM is told: the arguments of an engine, and the parameters of a sequence."""

import json
from typing import Any

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from rollout_server.engine_types import PromptRefused
from rollout_server.repeat_config import PROCESSOR
from rollout_server.settings import ServerSettings
from rollout_server.transfer_info import ENGINES
from shared_contracts.infer import RequestConfig

# Tokens of one CPU forward: some 80 prompts of 200 tokens prefill together.
CPU_BATCHED_TOKENS = 16384


def engine_args(settings: ServerSettings, index: int) -> AsyncEngineArgs:
    """vLLM's arguments for replica `index`."""
    common: dict[str, Any] = {
        "model": str(settings.model),
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": settings.enable_prefix_caching,
        # Both ends of the image cache would have to agree on requests that are rendered
        # and then refused because another one in their call is bad.
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"image": settings.max_images_per_request, "video": 0},
        "weight_transfer_config": WeightTransferConfig(backend=ENGINES[settings.transport]),
        "logits_processors": [PROCESSOR] if settings.repeat_terminate.enabled else None,
        # One adapter at a time; its tensors have the type of the model's.
        "enable_lora": settings.enable_lora,
        "max_loras": 1,
        "max_lora_rank": settings.max_lora_rank,
        "lora_dtype": "auto",
        # The learner's adapters may reach into the vision tower.
        "enable_tower_connector_lora": settings.enable_lora,
        "worker_extension_cls": "rollout_server.worker_extension.WorkerExtension",
    }
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
        # The worker lives in the engine process: one process less to start.
        "distributed_executor_backend": settings.distributed_executor_backend
        or ("uni" if settings.tensor_parallel_size == 1 else "mp"),
    }


def _cpu_dtype(settings: ServerSettings) -> str:
    """`auto` is the checkpoint's own type; vLLM would make bfloat16 of float32."""
    if settings.dtype != "auto":
        return settings.dtype
    config = json.loads((settings.model / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def _gpu_args(settings: ServerSettings, index: int) -> dict[str, Any]:
    by_ray = settings.distributed_executor_backend == "ray"
    return {
        "device_ids": None if by_ray else settings.gpus_of(index),
        "distributed_executor_backend": settings.distributed_executor_backend,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
    }


def sampling_params(
    config: RequestConfig, seed: int | None, max_tokens: int, sentinel: int | None = None
) -> SamplingParams:
    """Every sampling parameter explicitly, so that none comes from the checkpoint.

    sentinel: id with which the repeat guard ends the sequence.
    Raises PromptRefused for a combination vLLM does not take.
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
            # Needed to find stop strings; coordinate tokens may be declared special.
            detokenize=bool(config.stop),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (VLLMClientError, ValueError) as error:
        raise PromptRefused(str(error)) from error
