"""What a plain vLLM engine holds after a reload, read back as a worker of ours does it.

    python -m tests.contract.held_weights CHECKPOINT OTHER OUT

Starts CHECKPOINT in bfloat16 with room for LoRA adapters, reloads it with the weights of
OTHER, and writes to OUT which parameters are not held as they are in OTHER:

    {"faults": of the manifest, "compared": how many, "reloaded": NAMES, "rebuilt": NAMES,
     "replayed": NAMES, "packs": whether the head multiplies with a packed copy of its weight}

`reloaded` before and `rebuilt` after the packed copies of language-model heads were made anew;
`replayed` after the weights of CHECKPOINT have come by the copies of the plan.
Which library of vLLM the processor gets decides whether there are any.
"""

import json
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from vllm import LLM
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rollout_server.engines.verification import differences
from rollout_server.engines.vllm.load_plan import LoadableModel, Plan, shared_parameters, trace
from rollout_server.engines.vllm.read_back import Asked, subtotals
from rollout_server.engines.vllm.replay import Replay
from rollout_server.engines.vllm.weight_engines import rebuild_packed_heads
from shared_contracts.weights import ParameterDigest
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import Weights, digests, manifest


def start(checkpoint: str) -> LLM:
    return LLM(
        checkpoint,
        dtype="bfloat16",
        enable_lora=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=4096,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=8 * 2**20,
        distributed_executor_backend="uni",
    )


def reload(model: nn.Module, weights: Weights, model_config: Any) -> Plan:
    ties = shared_parameters(model)
    initialize_layerwise_reload(model)
    plan = trace(model, manifest(weights), "bfloat16", ties)
    cast(LoadableModel, model).load_weights(weights.items())
    finalize_layerwise_reload(model, model_config)
    return plan


def replayed(model: nn.Module, weights: Weights, plan: Plan, model_config: Any) -> list[str]:
    replay = Replay(model, model_config, plan)
    assert replay.begin()
    replay.load_weights(weights.items())
    replay.finish()
    return not_held(model, weights, plan)


def not_held(model: nn.Module, weights: Weights, plan: Plan) -> list[str]:
    parameters = {parameter.name: parameter for parameter in manifest(weights)}
    asked = [Asked(parameter, None) for parameter in parameters.values()]
    sent = [ParameterDigest.model_validate(digest) for digest in digests(weights)]
    answer = subtotals(model, plan, asked)
    return [each.name for each in differences(0, sent, parameters, [answer])]


def packs_its_head(model: nn.Module) -> bool:
    """Whether the head's product stays as it was when its weight changes."""
    (head,) = (module for module in model.modules() if isinstance(module, ParallelLMHead))
    method: Any = head.quant_method
    weight = head.get_parameter("weight").data
    row = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    before = method.apply(head, row, None)
    kept = weight.clone()
    weight.zero_()
    after = method.apply(head, row, None)
    weight.copy_(kept)
    return torch.equal(before, after)


if __name__ == "__main__":
    checkpoint, other, out = sys.argv[1:]
    llm = start(checkpoint)
    first, weights = (
        {name: w.to(torch.bfloat16) for name, w in read_weights(Path(folder)).items()}
        for folder in (checkpoint, other)
    )

    def look(model: nn.Module) -> dict[str, Any]:
        packs = packs_its_head(model)
        config = llm.llm_engine.model_config
        plan = reload(model, weights, config)
        reloaded = not_held(model, weights, plan)
        rebuild_packed_heads(model)
        return {
            "faults": [str(fault) for fault in plan.faults],
            "compared": len(plan.placements),
            "reloaded": reloaded,
            "rebuilt": not_held(model, weights, plan),
            "replayed": replayed(model, first, plan, config),
            "packs": packs,
        }

    (found,) = llm.apply_model(look)
    Path(out).write_text(json.dumps(found))
