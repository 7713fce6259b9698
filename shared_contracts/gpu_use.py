"""Who uses the GPUs of this machine, as `nvidia-smi` tells it (SRV-04)."""

import logging
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
# NVIDIA's driver has a folder in here for each GPU.
GPU_DEVICES = Path("/proc/driver/nvidia/gpus")
# An idle GPU holds some hundred MiB of its driver's; a process in another container is
# seen by its memory alone.
IDLE_MIB = 2048
QUERY_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuMemory:
    """A GPU and its memory, whoever uses it; index: its id on this machine."""

    index: int
    uuid: str
    used_mib: int
    total_mib: int


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU; used_mib: None where the driver does not tell."""

    gpu_uuid: str
    pid: int
    name: str
    used_mib: int | None

    def __str__(self) -> str:
        memory = "" if self.used_mib is None else f", {in_gib(self.used_mib)}"
        return f"{self.name} (pid {self.pid}{memory})"


@dataclass(frozen=True)
class GpuUse:
    """The GPUs of this machine and the processes on them, at one moment."""

    gpus: list[GpuMemory]
    processes: list[GpuProcess]


def query_gpu_use(program: str = "nvidia-smi") -> GpuUse | None:
    """What is known now; None, with a warning in the log, where `program` does not tell."""
    try:
        gpus = _ask(program, "--query-gpu=index,uuid,memory.used,memory.total")
        processes = _ask(program, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
        return GpuUse(parse_gpus(gpus), parse_processes(processes))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("%s does not tell who uses the GPUs (%s)", program, error)
        return None


def uuids_of(gpus: Sequence[int], use: GpuUse | None) -> list[str]:
    """Of the GPUs with these ids; empty unless every one of them is known."""
    known = {gpu.index: gpu.uuid for gpu in use.gpus} if use is not None else {}
    return [known[gpu] for gpu in gpus] if known.keys() >= set(gpus) else []


def parse_gpus(text: str) -> list[GpuMemory]:
    """Lines such as `0, GPU-6f1c, 1024, 81559` (MiB). Raises ValueError for others."""
    rows = [[field.strip() for field in line.split(",")] for line in _lines(text)]
    return [GpuMemory(int(i), uuid, int(used), int(total)) for i, uuid, used, total in rows]


def parse_processes(text: str) -> list[GpuProcess]:
    """Lines such as `GPU-6f1c, 4242, /usr/bin/python, 40960` (MiB).

    The name may hold commas; the memory may be `[N/A]`. Raises ValueError for others.
    """
    processes = []
    for line in _lines(text):
        uuid, pid, rest = line.split(",", maxsplit=2)
        name, _, memory = rest.rpartition(",")
        used = int(memory) if memory.strip().isdecimal() else None
        processes.append(GpuProcess(uuid.strip(), int(pid), name.strip(), used))
    return processes


def in_gib(mib: int) -> str:
    """MiB as a person reads them: `39.6 GiB`."""
    return f"{mib / 1024:.1f} GiB"


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _ask(program: str, query: str) -> str:
    done = subprocess.run(
        [program, query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
        timeout=QUERY_TIMEOUT_S,
    )
    return done.stdout
