"""`rollout-server` on a machine with GPUs that are not there, up to vLLM's whole configuration.

    python -m tests.rehearsal.faked_gpus FOLDER    a line of JSON for each replica, or the refusal

FOLDER has `commands.json`: [{"argv": [...], "gib": memory of each GPU, "environment": {...}}, ...].
The command line, the settings, the checks, the variables for the engine and vLLM's
`create_engine_config` are the real ones. Faked are the driver's folder, `nvidia-smi`, NVML, and
vLLM's platform, which is its own one for NVIDIA.

A process of its own: vLLM has one platform in a process.
"""

import json
import os
import socket
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from typer.main import get_command

from rollout_server import cli
from rollout_server.engines import vllm as engine_package
from rollout_server.settings import preflight
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import ContractError
from shared_contracts.machine import GpuMemory, GpuUse, visible_gpus

UUIDS = (
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932f937-b1c4-4a0e-9a51-0c8e7c1f2d3a",
    "GPU-5b1e0f6a-93d2-4f7b-8a44-6d1f0e2c9b70",
    "GPU-c7a9d3e2-1f58-4c66-b0f3-9e84a5d1706b",
)
GPUS = len(UUIDS)
NAME = "NVIDIA H100 80GB HBM3"


@dataclass
class Started:
    """The settings that a server begins to serve with, and the environment of its process."""

    gib: float
    settings: ServerSettings
    environment: dict[str, str]


def write_driver(folder: Path) -> Path:
    for index, uuid in enumerate(UUIDS):
        gpu = folder / f"0000:{index + 1:02x}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {NAME}\nGPU UUID: \t {uuid}\n")
    return folder


def fake_driver(devices: Path) -> None:
    checks: Any = preflight
    checks.check_gpus = partial(preflight.check_gpus, devices=devices)
    package: Any = engine_package
    package.visible_gpus = partial(visible_gpus, devices=devices)


def started(argv: list[str], gib: float, environment: Mapping[str, str]) -> Started:
    """Settings of a server with this command line. environment: set for this process."""
    checks: Any = preflight
    checks.query_gpu_use = lambda: use_of(gib)
    found: list[ServerSettings] = []

    def serve(settings: ServerSettings, listener: socket.socket) -> None:
        found.append(settings)
        listener.close()

    server: Any = types.ModuleType("rollout_server.serve")
    server.serve = serve
    sys.modules["rollout_server.serve"] = server
    take(environment)
    get_command(cli.app)(["serve", *argv], standalone_mode=False)
    return Started(gib, found[0], dict(os.environ))


def take(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def use_of(gib: float) -> GpuUse:
    return GpuUse([GpuMemory(i, uuid, 0, int(gib * 1024)) for i, uuid in enumerate(UUIDS)], [])


def fake_nvml(gib: float) -> None:
    """Below vLLM's platform; a handle is the id of a GPU. As NVML, it takes whole UUIDs alone."""
    from vllm.third_party import pynvml as real

    def by_uuid(uuid: str | bytes) -> int:
        name = uuid.decode() if isinstance(uuid, bytes) else uuid
        if name not in UUIDS:
            raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)
        return UUIDS.index(name)

    pynvml: Any = real
    pynvml.nvmlInit = pynvml.nvmlShutdown = lambda *_: None
    pynvml.nvmlDeviceGetCount = lambda: GPUS
    pynvml.nvmlDeviceGetHandleByIndex = lambda index: index
    pynvml.nvmlDeviceGetHandleByUUID = by_uuid
    pynvml.nvmlDeviceGetIndex = lambda handle: handle
    pynvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
    pynvml.nvmlDeviceGetName = lambda handle: NAME
    memory = types.SimpleNamespace(total=int(gib * 2**30))
    pynvml.nvmlDeviceGetMemoryInfo = lambda handle: memory


def put_platform() -> None:
    """Replace vLLM's platform for the CPU by that for NVIDIA in all imported modules."""
    import torch
    from vllm import platforms as real

    platforms: Any = real
    torch.cuda._is_compiled = lambda: True
    torch.cuda._device_count_nvml = lambda: GPUS
    kernels = "vllm._C_stable_libtorch"  # which the build for the CPU has not
    sys.modules.setdefault(kernels, types.ModuleType(kernels))
    from vllm.device_allocator import cumem
    from vllm.platforms.cuda import CudaPlatform

    cumem.cumem_available = True  # whose library the build for the CPU has not
    cpu, cuda = platforms.current_platform, CudaPlatform()
    for module in list(sys.modules.values()):
        if vars(module).get("current_platform") is cpu:
            module.current_platform = cuda  # type: ignore[attr-defined]
    platforms._current_platform = cuda


def have_triton() -> None:
    """Without Triton, vLLM chooses the model runner V1 whatever a server asks for."""
    from vllm.config import vllm

    config: Any = vllm
    config.HAS_TRITON = True


def described(server: Started) -> Iterator[dict[str, Any]]:
    from rollout_server.engines.vllm.engine import engine_args

    fake_nvml(server.gib)
    take(server.environment)
    settings = server.settings
    for index in range(settings.num_replicas):
        config = engine_args(settings, index).create_engine_config()
        scheduler, parallel = config.scheduler_config, config.parallel_config
        transfer = config.weight_transfer_config
        yield {
            "device": config.device_config.device_type,
            "gpus": parallel.assigned_physical_gpu_ids,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "worker": parallel.worker_cls,
            "v2_runner": config.use_v2_model_runner,
            "dtype": str(config.model_config.dtype),
            "architecture": config.model_config.architecture,
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "chunked_prefill": scheduler.enable_chunked_prefill,
            "encoder_tokens": scheduler.max_num_encoder_input_tokens,
            "share": config.cache_config.gpu_memory_utilization,
            "transfer": transfer.backend if transfer is not None else None,
            "sleep_mode": config.model_config.enable_sleep_mode,
            "lora": config.lora_config is not None,
            "guards": config.model_config.logits_processors,
        }


def main(folder: Path) -> None:
    commands = json.loads((folder / "commands.json").read_text(encoding="utf-8"))
    fake_driver(write_driver(folder / "gpus"))
    before = dict(os.environ)
    made: list[Started | ContractError] = []
    for command in commands:
        environment = before | command["environment"]
        try:
            made.append(started(command["argv"], command["gib"], environment))
        except ContractError as error:
            made.append(error)
    import rollout_server.engines.vllm.engine  # noqa: F401  all of vLLM, before its platform is put

    fake_nvml(80)  # vLLM looks for it when its platform is imported
    put_platform()
    have_triton()
    configured: dict[str, list[dict[str, Any]]] = {}
    for command, each in zip(commands, made, strict=True):
        if isinstance(each, ContractError):
            print(json.dumps({"refused": each.where, "found": each.found, "do": each.do}))
            continue
        same = repr(
            (each.settings.model_copy(update={"port": 0}), each.gib, command["environment"])
        )
        if same not in configured:  # vLLM takes seconds; many profiles have equal settings
            configured[same] = list(described(each))
        print(json.dumps(configured[same]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
