"""Pushes of full-size models into vLLM's, on the meta device: no weights, no GPU, no engine.

Run as a module, since vLLM's model needs a process group of its own:
`python -m tests.rehearsal.full_size_plans [--rounds N] FOLDER SIZE...` prints one JSON object for
each size, with a worker's processor time of N pushes.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from vllm import distributed
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from learner.rollout.server_process import free_ports
from learner.rollout.sync.weights import MergedWeights
from rollout_server.engines.vllm import push_engine
from rollout_server.engines.vllm.push_engine import Manifest, PushEngine, Receiver
from rollout_server.weights.manifest import checkpoint_parameters
from shared_contracts.weights import digest
from tests.unit.full_size_models import make_full_size

BUCKET_BYTES = 64 * 2**20
SMALL = torch.zeros(8192, dtype=torch.int64)


class Buckets(Receiver):
    """Buckets without data, and a trailer of zeros."""

    def __init__(self) -> None: ...

    def receive(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        for size in sizes[:-1]:
            yield torch.empty(size, dtype=torch.uint8, device="meta")
        yield torch.zeros(sizes[-1], dtype=torch.uint8)


def digest_of_nothing(*_: object) -> int:
    """Take the processor time of a digest; on the meta device each operation is slow Python."""
    digest(SMALL, SMALL)
    return 0


def worker(folder: Path) -> PushEngine:
    config = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=4096,
        enforce_eager=True,
        load_format="dummy",
        limit_mm_per_prompt={"image": 1, "video": 0},
    ).create_engine_config()
    with set_current_vllm_config(config):
        if distributed.model_parallel_is_initialized():
            distributed.destroy_model_parallel()  # only a model of experts has a group for them
        else:
            (port,) = free_ports(1)
            place = f"tcp://127.0.0.1:{port}"
            distributed.init_distributed_environment(1, 0, place, 0, backend="gloo")
        distributed.initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            model: Any = initialize_model(config)
            record_metadata_for_reloading(model)
    transfer: Any = config.weight_transfer_config
    engine = PushEngine(transfer, config, torch.device("meta"), model)
    engine._group, engine._bucket_bytes = Buckets(), BUCKET_BYTES
    return engine


def lacks_weights(module: Any) -> bool:
    """Return whether vLLM's reload waits for more than the padding of a vocabulary."""
    info = get_layerwise_info(module)
    if not info.load_numel_total or not list(module.parameters(recurse=False)):
        return False
    padded, rows = (getattr(module, n, 0) for n in ("num_embeddings_padded", "org_vocab_size"))
    padding = (padded - rows) * getattr(module, "embedding_dim", 0)
    return bool(info.load_numel + padding < info.load_numel_total)


def describe(folder: Path, rounds: int) -> dict[str, Any]:
    """Push once and look what is filled; then measure milliseconds of processor time."""
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    sent, engine = MergedWeights(model).metadata("bfloat16"), worker(folder)
    described = [parameter.model_dump() for parameter in sent]
    times, unfilled = list[float](), list[str]()
    with set_current_vllm_config(engine.vllm_config):
        for number in range(rounds + 1):
            began = time.process_time()
            engine.start_weight_update()
            engine.receive_weights(Manifest(described))
            if number == 0:
                modules = engine.model.named_modules()
                unfilled = [name for name, module in modules if lacks_weights(module)]
            engine.finish_weight_update()
            times.append(1000 * (time.process_time() - began))
    return {
        "parameters": len(sent),
        "bytes": sum(parameter.num_bytes for parameter in sent),
        "expected": checkpoint_parameters(folder) == {each.name: each.shape for each in sent},
        "unfilled": unfilled,
        "ms": times[1:],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sizes", nargs="+")
    options = parser.parse_args()
    module: Any = push_engine
    module.digest = digest_of_nothing
    # vLLM's CPU build packs experts by an operator that has no meta form.
    torch.library.register_fake("_C::prepack_moe_weight", lambda weight, output, isa: None)
    for size in options.sizes:
        folder = make_full_size(options.folder / size, size)
        print(json.dumps({"size": size, **describe(folder, options.rounds)}))


if __name__ == "__main__":
    main()
