"""Plans of pushes of full-size models, on the meta device: no weights, no GPU, no engine.

Run as a module, since vLLM's model needs a process group of its own:
`python -m tests.rehearsal.full_size_plans [--rounds N] FOLDER SIZE...` prints one JSON object for
each size, with the processor time of N pushes by vLLM's loaders and by the plan. A model of experts
is only planned: vLLM's CPU build packs them by an operator that has no meta form.
"""

import argparse
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from learner.rollout.sync.weights import MergedWeights
from rollout_server.engines.vllm.load_plan import Plan, shared_parameters, trace
from rollout_server.engines.vllm.replay import Replay
from rollout_server.engines.vllm.weight_engines import unpack
from shared_contracts.weights import ParameterMeta, plan_buckets
from tests.unit.full_size_models import make_full_size

BUCKET_BYTES = 64 * 2**20


def manifest(folder: Path) -> list[ParameterMeta]:
    described = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(described, dtype=torch.bfloat16)
    return MergedWeights(model).metadata("bfloat16")


def engine_model(folder: Path) -> tuple[Any, Any]:
    """vLLM's config and its model of the folder, on the meta device."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=4096,
        enforce_eager=True,
        load_format="dummy",
        limit_mm_per_prompt={"image": 1, "video": 0},
    ).create_engine_config()
    with set_current_vllm_config(config):
        if model_parallel_is_initialized():
            destroy_model_parallel()  # only a model of experts has a group for them
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            init_distributed_environment(1, 0, place, 0, backend="gloo")
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            model = initialize_model(config)
        ties = shared_parameters(model)
        initialize_layerwise_reload(model)
        for name in ties:
            _give_its_own(model, name)
    return config, (model, ties)


def _give_its_own(model: Any, name: str) -> None:
    """As vLLM's reload does with a tied parameter, but not with one on the meta device."""
    owner, _, leaf = name.rpartition(".")
    tied = getattr(model.get_submodule(owner), leaf)
    own = torch.nn.Parameter(torch.empty_like(tied), requires_grad=False)
    vars(own).update(vars(tied))
    setattr(model.get_submodule(owner), leaf, own)


def milliseconds(work: Callable[[], object]) -> float:
    """Of processor time."""
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


def pushes(
    model: Any, model_config: Any, plan: Plan, sent: list[ParameterMeta], rounds: int
) -> Any:
    """Milliseconds of each push by vLLM's loaders and by the plan; a worker's part of it."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    described = [parameter.model_dump() for parameter in sent]
    replay = Replay(model, model_config, plan)

    def buckets() -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        parameters = [ParameterMeta.model_validate(each) for each in described]
        for bucket in plan_buckets(parameters, BUCKET_BYTES):
            together = parameters[bucket.start : bucket.stop]
            size = sum(each.wire_bytes for each in together)
            data = torch.empty(size, dtype=torch.uint8, device="meta")
            yield unpack(data, together, data.device)

    def load() -> None:
        initialize_layerwise_reload(model)
        for bucket in buckets():
            model.load_weights(bucket)
        finalize_layerwise_reload(model, model_config)

    def copy() -> None:
        assert replay.begin()
        for bucket in buckets():
            replay.load_weights(bucket)
        replay.finish()

    found = [(milliseconds(load), milliseconds(copy)) for _ in range(rounds + 1)][1:]
    return {"loaders_ms": [a for a, _ in found], "replay_ms": [b for _, b in found]}


def describe(folder: Path, rounds: int) -> dict[str, Any]:
    """The plan of a push, its manifest, and the milliseconds of pushes."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    plain = manifest(folder)
    config, (model, ties) = engine_model(folder)
    with set_current_vllm_config(config):
        plan = trace(model, plain, "bfloat16", ties)
        times: dict[str, list[float]] = {}
        if rounds > 0 and config.model_config.get_num_experts() == 0:
            finalize_layerwise_reload(model, config.model_config)
            times = pushes(model, config.model_config, plan, plain, rounds)
    return {
        "faults": [str(fault) for fault in plan.faults],
        "parameters": len(plain),
        "planned": len(plan.placements),
        "bytes": sum(p.num_bytes for p in plain),
        "tied": len(ties),
        **times,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sizes", nargs="+")
    options = parser.parse_args()
    for size in options.sizes:
        folder = make_full_size(options.folder / size, size)
        print(json.dumps({"size": size, **describe(folder, options.rounds)}))


if __name__ == "__main__":
    main()
