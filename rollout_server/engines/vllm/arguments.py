"""vLLM's arguments for the engine of a replica."""

import json
from typing import Any

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from rollout_server.engines.vllm.push_engine import BACKEND
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.repeat_config import PROCESSOR
from shared_contracts.footprint import ENGINE_SHARE

# Tokens of one CPU forward: about 80 prompts of 200 tokens.
CPU_BATCHED_TOKENS = 16384
# Tokens of one GPU forward; vLLM's default for an engine outside of its own server is 2,048.
GPU_BATCHED_TOKENS = 8192
# Worker extension that reads the repeat guard.
REPORT = "rollout_server.engines.vllm.repeat_processor.RepeatReport"


def engine_args(settings: ServerSettings, index: int) -> AsyncEngineArgs:
    """Return vLLM's arguments for replica `index`."""
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
