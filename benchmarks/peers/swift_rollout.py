"""ms-swift's `swift rollout` on the CPU, with its check for a GPU left out.

    python -m benchmarks.peers.swift_rollout CHECKPOINT PORT [OPTION ...]

Its engine (the synchronous one, its default) lives in a worker process, which inherits the
environment. The toy vocabulary ends before the image token its template writes into prompts,
so it serves text alone here.
"""

import json
import sys
from pathlib import Path

from benchmarks.processes import end_with_benchmark
from benchmarks.workload import engine_settings


def rollout_options(checkpoint: Path, port: str) -> list[str]:
    """Command-line options that give its engine the settings of our own."""
    from rollout_server.engines.vllm.engine import engine_args

    ours = engine_args(engine_settings(checkpoint), 0)
    passed_through = ("enable_chunked_prefill", "kv_cache_memory_bytes", "max_num_batched_tokens")
    options = {
        "model": checkpoint,
        "model_type": "qwen3_vl",
        "host": "127.0.0.1",
        "port": port,
        "torch_dtype": ours.dtype,
        "vllm_max_model_len": ours.max_model_len,
        "vllm_max_num_seqs": ours.max_num_seqs,
        "vllm_enforce_eager": str(ours.enforce_eager).lower(),
        "vllm_enable_prefix_caching": str(ours.enable_prefix_caching).lower(),
        "vllm_mm_processor_cache_gb": ours.mm_processor_cache_gb,
        "vllm_limit_mm_per_prompt": json.dumps(ours.limit_mm_per_prompt),
        "vllm_engine_kwargs": json.dumps({name: getattr(ours, name) for name in passed_through}),
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def main() -> None:
    end_with_benchmark()
    checkpoint, port = Path(sys.argv[1]), sys.argv[2]
    from swift.arguments import RolloutArguments
    from swift.pipelines import rollout_main

    RolloutArguments._check_device_count = lambda self: None
    rollout_main([*rollout_options(checkpoint, port), *sys.argv[3:]])


if __name__ == "__main__":
    main()
