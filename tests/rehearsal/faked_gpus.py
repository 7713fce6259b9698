"""`rollout-server` on a machine with GPUs that are not there, up to vLLM's whole configuration.

    python -m tests.rehearsal.faked_gpus FOLDER    a line of JSON for each replica, or the refusal

FOLDER has `commands.json`: [{"argv": [...], "gib": memory of each GPU}, ...]. The command line, the
settings, the checks and vLLM's `create_engine_config` are the real ones. Faked are the driver's
folder, `nvidia-smi`, NVML, and vLLM's platform, which is its own one for NVIDIA.

A process of its own: vLLM has one platform in a process.
"""

import json
import os
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from rollout_server import cli
from rollout_server.engines.vllm import environment
from rollout_server.settings import preflight
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import ContractError
from shared_contracts.machine import GpuMemory, GpuUse

GPUS = 4
NAME = "NVIDIA H100 80GB HBM3"


def settings_of(argv: list[str], use: GpuUse) -> ServerSettings:
    """What the command line would serve with."""
    checks: Any = preflight
    checks.query_gpu_use = lambda: use
    checks.check_gpus = lambda gpus, environment: None
    found: list[ServerSettings] = []

    def serve(settings: ServerSettings, listener: socket.socket) -> None:
        found.append(settings)
        listener.close()

    server: Any = types.ModuleType("rollout_server.serve")
    server.serve = serve
    sys.modules["rollout_server.serve"] = server
    get_command(cli.app)(["serve", *argv], standalone_mode=False)
    return found[0]


def use_of(gib: float) -> GpuUse:
    return GpuUse([GpuMemory(i, f"GPU-{i}", 0, int(gib * 1024)) for i in range(GPUS)], [])


def fake_nvml(gib: float) -> None:
    """Below vLLM's platform; a handle is the id of a GPU."""
    from vllm.third_party import pynvml as real

    pynvml: Any = real
    pynvml.nvmlInit = pynvml.nvmlShutdown = lambda *_: None
    pynvml.nvmlDeviceGetCount = lambda: GPUS
    pynvml.nvmlDeviceGetHandleByIndex = lambda index: index
    pynvml.nvmlDeviceGetHandleByUUID = lambda uuid: int(str(uuid).removeprefix("GPU-"))
    pynvml.nvmlDeviceGetIndex = lambda handle: handle
    pynvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
    pynvml.nvmlDeviceGetName = lambda handle: NAME
    memory = types.SimpleNamespace(total=int(gib * 2**30))
    pynvml.nvmlDeviceGetMemoryInfo = lambda handle: memory


def put_platform() -> None:
    """Put vLLM's platform for NVIDIA in the place of that for the CPU, wherever it was imported."""
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


def described(settings: ServerSettings) -> Iterator[dict[str, Any]]:
    """vLLM's configuration of each replica."""
    from rollout_server.engines.vllm.arguments import engine_args

    os.environ.update(environment(settings))
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
        }


def main(folder: Path) -> None:
    commands = json.loads((folder / "commands.json").read_text(encoding="utf-8"))
    made: list[tuple[float, ServerSettings | ContractError]] = []
    for command in commands:
        try:
            made.append((command["gib"], settings_of(command["argv"], use_of(command["gib"]))))
        except ContractError as error:
            made.append((command["gib"], error))
    import rollout_server.engines.vllm.engine  # noqa: F401  all of vLLM, before its platform is put

    fake_nvml(80)  # vLLM looks for it when its platform is imported
    put_platform()
    for gib, settings in made:
        if isinstance(settings, ContractError):
            print(json.dumps({"refused": settings.where, "found": settings.found}))
            continue
        fake_nvml(gib)
        print(json.dumps(list(described(settings))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
