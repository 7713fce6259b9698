"""The place of the learner's own rollout server, on its own devices (ROLL-03).

    visible_gpus -> place -> server_settings -> a server process -> ColocatedBackend
                          -> learner_environment, before torch is imported

With several learner processes, process 0 owns the server, and it has one worker on the device of
each. Imports no torch and no numpy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.config.schema import Config
from learner.types import Sample
from shared_contracts.errors import ContractError
from shared_contracts.machine import CUDA_VISIBLE
from shared_contracts.rollout_config import VllmConfig
from shared_contracts.weights import Transport

GPU_MEMORY_UTILIZATION = 0.45
# By default the first of these that fits the visible GPUs.
TENSOR_PARALLEL_SIZES = (4, 2, 1)


@dataclass(frozen=True)
class Placement:
    """The devices of the server.

    gpus: ids on this machine; empty: the CPU. replicas: engines, of `tensor_parallel_size` workers.
    adapted: how it differs from the defaults of the contract, and why; empty if it does not.
    """

    gpus: tuple[int, ...]
    tensor_parallel_size: int
    gpu_memory_utilization: float
    adapted: str
    replicas: int = 1

    def __str__(self) -> str:
        device = f"GPU {', '.join(map(str, self.gpus))}" if self.gpus else "the CPU"
        shape = f"tensor_parallel_size {self.tensor_parallel_size}"
        if self.replicas > 1:
            shape = f"{self.replicas} replicas, {shape}"
        memory = f", gpu_memory_utilization {self.gpu_memory_utilization:g}" if self.gpus else ""
        return f"{device}, {shape}{memory}{f' ({self.adapted})' if self.adapted else ''}"


def place(vllm: VllmConfig, gpus: Sequence[int], processes: int = 1) -> Placement:
    """Choose the GPUs of the server among those that the learner sees.

    processes: of the learner; several have a worker on the GPU of each, the first ones visible.
    Raises ContractError for a `tensor_parallel_size` that does not fit.
    """
    where, asked = "rollout_matching.vllm.tensor_parallel_size", vllm.tensor_parallel_size
    workers = processes if processes > 1 else max(len(gpus), 1)
    if processes > 1 and asked is not None and (workers % asked or (asked > 1 and not gpus)):
        raise ContractError(
            where,
            f"{asked}, and there is one worker for each of {processes} learner processes",
            "Set it to a divisor of the number of processes, or leave it out",
        )
    if asked is not None and asked > workers:
        seen = "no GPU is" if not gpus else f"{len(gpus)} of them are"
        raise ContractError(
            where,
            f"{asked} GPUs are asked for, and {seen} visible to the learner",
            f"Lower it to {workers} or leave it out, or make more visible ({CUDA_VISIBLE})",
        )
    most = workers if gpus else 1
    fits = [n for n in TENSOR_PARALLEL_SIZES if n <= most and (processes == 1 or not workers % n)]
    size, adapted = asked or fits[0], ""
    if processes == 1 and asked is None and size < TENSOR_PARALLEL_SIZES[0]:
        found = "no GPU is visible" if not gpus else f"{len(gpus)} visible"
        adapted = f"tensor_parallel_size {TENSOR_PARALLEL_SIZES[0]} by default, but {found}"
    replicas = processes // size if processes > 1 else 1
    return Placement(
        gpus=tuple(gpus[: replicas * size]),
        tensor_parallel_size=size,
        gpu_memory_utilization=vllm.gpu_memory_utilization or GPU_MEMORY_UTILIZATION,
        adapted=adapted,
        replicas=replicas,
    )


def learner_environment(placement: Placement | None, processes: int = 1) -> dict[str, str]:
    """Return the variables that give one process the first GPU of its server.

    Each of several processes uses the GPU of its own number.
    """
    if placement is None or not placement.gpus or processes > 1:
        return {}
    return {CUDA_VISIBLE: str(placement.gpus[0])}


def server_settings(
    config: Config,
    placement: Placement,
    media_dirs: Sequence[Path],
    transport: Transport,
    context: int,
) -> dict[str, Any]:
    """Return the settings of the server that the training YAML (`--run-config`) does not have.

    context: tokens of the longest prompt with its answer.
    """
    settings = {
        "model": str(config.model.model),
        "dtype": config.model.torch_dtype,
        "max_model_len": context,
        "allowed_media_dirs": [str(folder) for folder in media_dirs],
        "weight_transport": transport,
    }
    if not placement.gpus:
        replicas = {"replicas": placement.replicas} if placement.replicas > 1 else {}
        return settings | {"device": "cpu"} | replicas
    return settings | {
        "device": "gpu",
        "gpus": list(placement.gpus),
        "share_gpus": True,
        "tensor_parallel_size": placement.tensor_parallel_size,
        "gpu_memory_utilization": placement.gpu_memory_utilization,
    }


def media_dirs(samples: Iterable[Sample]) -> list[Path]:
    """Return the folders of all images; the server must be allowed to read them."""
    return sorted({image.parent for sample in samples for image in sample.images})


def describe_backend(config: Config, placement: Placement | None) -> str:
    """Describe the backend in one line. placement: of a colocated server, if there is one."""
    rollout = config.rollout_matching
    if rollout.backend == "hf":
        return "transformers, in the learner"
    if rollout.backend == "colocate":
        where = "" if placement is None else f" on {placement}"
        return f"a rollout server of the learner's own{where}"
    assert rollout.vllm.server is not None
    return ", ".join(server.base_url for server in rollout.vllm.server.servers)
