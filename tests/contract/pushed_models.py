"""Weights pushed into vLLM's models by its loaders and by a plan, against fresh models.

    python -m tests.contract.pushed_models FOLDER RANK RANKS NAME...

One rank of a tensor-parallel group, which meets in FOLDER. Makes tiny models, loads each as a
worker does, and prints a line for each:

    {"name", "faults": of the plan, "constants": how many the plan has,
     "loaded", "replayed": TENSORS, "unchanged": TENSORS}

`loaded` and `replayed`: tensors that differ in some bit from those of a fresh model that has read
the same weights from a checkpoint, after a push by the loaders and after one by the plan.
`unchanged`: tensors with the values that they had before the push by the plan.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rollout_server.engines.vllm.load_plan import LoadableModel, Plan, shared_parameters, trace
from rollout_server.engines.vllm.packed_experts import set_up_anew
from rollout_server.engines.vllm.replay import Replay
from rollout_server.engines.vllm.weight_engines import rebuild_packed_heads
from shared_contracts.weights import DtypeName, plan_buckets
from tests.contract.toy_checkpoints import WEIGHTS, make_checkpoint, read_weights
from tests.contract.weight_sender import BUCKET_BYTES, Weights, manifest

# Tensors, and what modules compute, by name.
Snapshot = dict[str, Tensor]


def make_experts(out: Path) -> Path:
    """A language model of a dense layer and one of four experts."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"head_dim": 16}
    config = Qwen3MoeConfig(
        **sizes,
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mlp_only_layers=[0],
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(out)
    return out


MODELS: dict[str, tuple[DtypeName, Callable[[Path], Path]]] = {
    "tied": ("float32", lambda out: make_checkpoint(out, 0)),
    "untied": ("float32", lambda out: make_checkpoint(out, 0, tie=False)),
    "bfloat16": ("bfloat16", lambda out: make_checkpoint(out, 0)),
    "qwen2.5": ("bfloat16", lambda out: make_checkpoint(out, 0, family="qwen2_5_vl")),
    "experts": ("bfloat16", make_experts),
}


def random_weights(checkpoint: Path, dtype: DtypeName, seed: int) -> Weights:
    """Other values in every tensor of a checkpoint."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(weight.shape, generator=draw).to(getattr(torch, dtype))
        for name, weight in read_weights(checkpoint).items()
    }


def engine_config(checkpoint: Path, dtype: DtypeName, ranks: int) -> VllmConfig:
    return EngineArgs(
        model=str(checkpoint),
        dtype=cast(Any, dtype),
        max_model_len=512,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=8 * 2**20,
        tensor_parallel_size=ranks,
    ).create_engine_config()


class Engine:
    """A model of vLLM in a worker, and both ways to push to it."""

    def __init__(self, checkpoint: Path, dtype: DtypeName, ranks: int) -> None:
        self.config = engine_config(checkpoint, dtype, ranks)
        with set_current_vllm_config(self.config):
            self.model: nn.Module = get_model(vllm_config=self.config)
        self.plan = Plan()
        self._dtype = dtype
        self._alone = ranks == 1  # experts of several ranks need more than the model
        self._replay: Replay | None = None

    def load(self, weights: Weights) -> None:
        """Push through vLLM's loaders; then bake the plan."""
        ties = shared_parameters(self.model)
        with set_current_vllm_config(self.config):
            set_up_anew(self.model)
            initialize_layerwise_reload(self.model)
            self.plan = trace(self.model, manifest(weights), self._dtype, ties)
            _send(weights, cast(LoadableModel, self.model))
            finalize_layerwise_reload(self.model, self.config.model_config)
            rebuild_packed_heads(self.model)
        self._replay = Replay(self.model, self.config.model_config, self.plan)

    def replay(self, weights: Weights) -> None:
        """Push by the plan."""
        assert self._replay is not None
        assert self._replay.begin()
        with set_current_vllm_config(self.config):
            set_up_anew(self.model)
            _send(weights, self._replay)
            self._replay.finish()

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """All tensors of the model, and the products of its layers."""
        found = {name: tensor.clone() for name, tensor in self.model.named_parameters()}
        found |= {name: tensor.clone() for name, tensor in self.model.named_buffers()}
        with set_current_vllm_config(self.config), set_forward_context(None, self.config):
            for name, module in self.model.named_modules():
                if isinstance(module, LinearBase | ParallelLMHead):
                    found[f"product of {name}"] = self._product(module)
                elif type(module).__name__ == "Qwen3MoeSparseMoeBlock" and self._alone:
                    found[f"answer of {name}"] = module(self._input(module.gate.input_size))
        return found

    def _product(self, module: Any) -> Tensor:
        if isinstance(module, ParallelLMHead):
            width = module.embedding_dim
        else:
            width = getattr(module, "input_size_per_partition", module.input_size)
        product: Tensor = module.quant_method.apply(module, self._input(width), None)
        return product.clone()

    def _input(self, width: int) -> Tensor:
        draw = torch.Generator().manual_seed(width)
        return torch.randn(8, width, generator=draw).to(getattr(torch, self._dtype))


def _send(weights: Weights, model: LoadableModel) -> None:
    """In the buckets of a push, whose memory is used again."""
    names = list(weights)
    for bucket in plan_buckets(manifest(weights), BUCKET_BYTES):
        model.load_weights((names[i], weights[names[i]].clone()) for i in bucket)


def compared(checkpoint: Path, name: str, ranks: int) -> dict[str, Any]:
    dtype = MODELS[name][0]
    first, second, third = (random_weights(checkpoint, dtype, seed) for seed in range(3))
    engine = Engine(checkpoint, dtype, ranks)
    save_file(second, checkpoint / WEIGHTS, metadata={"format": "pt"})
    expected = Engine(checkpoint, dtype, ranks).snapshot()
    engine.load(second)
    loaded = engine.snapshot()
    engine.load(third)
    before = engine.snapshot()
    engine.replay(first)
    engine.replay(second)
    replayed = engine.snapshot()
    buffers = {name for name, _ in engine.model.named_buffers()}
    return {
        "name": name,
        "faults": [str(fault) for fault in engine.plan.faults],
        "constants": sum(map(len, engine.plan.constants.values())),
        "loaded": [key for key in expected if not torch.equal(expected[key], loaded[key])],
        "replayed": [key for key in expected if not torch.equal(expected[key], replayed[key])],
        "unchanged": [
            key
            for key, tensor in replayed.items()
            if tensor.numel() > 0 and key not in buffers and torch.equal(before[key], tensor)
        ],
    }


def main() -> None:
    folder, own = Path(sys.argv[1]), Path(sys.argv[1]) / sys.argv[2]
    rank, ranks, names = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    # Before the group, in which one rank alone would save.
    checkpoints = {name: MODELS[name][1](own / name) for name in names}
    config = engine_config(checkpoints["experts"], "bfloat16", ranks)
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"file://{folder}/meet", rank, backend="gloo")
        initialize_model_parallel(ranks, 1)  # and a group of experts
    for name, checkpoint in checkpoints.items():
        print(json.dumps(compared(checkpoint, name, ranks)), flush=True)


if __name__ == "__main__":
    main()
