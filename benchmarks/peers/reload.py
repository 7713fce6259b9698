"""An engine that reloads weights it has in its own memory: loading, without any transfer.

    python -m benchmarks.peers.reload CHECKPOINT

Answers each line of its input with `{"seconds": ...}` of one reload: vLLM's layerwise reload
of the checkpoint's tensors, which were read into memory before.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.processes import end_with_benchmark
from benchmarks.workload import engine_settings

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object


class ReloadExtension(Worker):
    """Mixed into the engine's worker (`worker_extension_cls`)."""

    def reload(self, checkpoint: str) -> float:
        """Seconds of one reload from memory."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        weights = load_file(Path(checkpoint) / "model.safetensors")
        copies: list[tuple[str, torch.Tensor]] = [(k, w.clone()) for k, w in weights.items()]
        model = self.model_runner.get_model()
        began = time.perf_counter()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            cast(Any, model).load_weights(copies)
            finalize_layerwise_reload(model, self.model_config)
        return time.perf_counter() - began


async def serve(checkpoint: Path, answers: Any) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout_server.engines.vllm.arguments import engine_args

    args = engine_args(engine_settings(checkpoint), 0)
    args.worker_extension_cls = "benchmarks.peers.reload.ReloadExtension"
    llm = AsyncLLM.from_vllm_config(args.create_engine_config(), disable_log_stats=True)
    try:
        print("ready", file=answers, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            (seconds,) = await llm.collective_rpc("reload", args=(str(checkpoint),))
            print(json.dumps({"seconds": seconds}), file=answers, flush=True)
    finally:
        llm.shutdown()


def main() -> None:
    end_with_benchmark()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(serve(Path(sys.argv[1]), answers))


if __name__ == "__main__":
    main()
