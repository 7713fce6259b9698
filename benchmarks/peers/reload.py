"""An engine that reloads weights it has in its own memory: loading, without any transfer.

    python -m benchmarks.peers.reload CHECKPOINT

Answers each line of its input with `{"seconds": ...}` of one reload of the checkpoint's tensors,
which were read into memory before: `loaders` runs vLLM's layerwise reload, `plan` makes the copies
of the load plan (`rollout_server/engines/vllm/replay.py`).
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

    replay: Any = None

    def reload(self, checkpoint: str, way: str) -> float:
        """Seconds of one reload from memory."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config

        weights = load_file(Path(checkpoint) / "model.safetensors")
        copies: list[tuple[str, torch.Tensor]] = [(k, w.clone()) for k, w in weights.items()]
        if way == "plan" and self.replay is None:
            self.replay = self._planned(copies)
        with set_current_vllm_config(self.vllm_config):
            began = time.perf_counter()
            if way == "plan":
                assert self.replay.begin()
                self.replay.load_weights(copies)
                self.replay.finish()
            else:
                self._load(copies)
            return time.perf_counter() - began

    def _load(self, copies: list[tuple[str, "torch.Tensor"]]) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        initialize_layerwise_reload(model)
        cast(Any, model).load_weights(copies)
        finalize_layerwise_reload(model, self.model_config)

    def _planned(self, copies: list[tuple[str, "torch.Tensor"]]) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        from rollout_server.engines.vllm.load_plan import shared_parameters, trace
        from rollout_server.engines.vllm.replay import Replay
        from shared_contracts.weights import ParameterMeta

        manifest = [
            ParameterMeta(name=name, dtype="float32", shape=list(weight.shape))
            for name, weight in copies
        ]
        model = self.model_runner.get_model()
        ties = shared_parameters(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            plan = trace(model, manifest, "float32", ties)
            finalize_layerwise_reload(model, self.model_config)
        return Replay(model, self.model_config, plan)


async def serve(checkpoint: Path, answers: Any) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout_server.engines.vllm.arguments import engine_args

    args = engine_args(engine_settings(checkpoint), 0)
    args.worker_extension_cls = "benchmarks.peers.reload.ReloadExtension"
    llm = AsyncLLM.from_vllm_config(args.create_engine_config(), disable_log_stats=True)
    try:
        print("ready", file=answers, flush=True)
        while way := await asyncio.to_thread(sys.stdin.readline):
            (seconds,) = await llm.collective_rpc("reload", args=(str(checkpoint), way.strip()))
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
