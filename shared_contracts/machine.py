"""This machine: use of its GPUs (`nvidia-smi`, SRV-04), its address, parent-death signals."""

import ctypes
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shared_contracts.errors import ContractError

CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
# CUDA's default order starts with the fastest GPU; that of nvidia-smi and the driver is PCI_BUS_ID.
CUDA_ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
# NVIDIA's driver has a folder here for each GPU.
GPU_DEVICES = Path("/proc/driver/nvidia/gpus")
# Above the driver's use of an idle GPU (some hundred MiB); more memory means a process, which may
# be invisible in another container.
IDLE_MIB = 2048
QUERY_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


def visible_gpus(environment: Mapping[str, str], devices: Path = GPU_DEVICES) -> list[int]:
    """Return the ids of the GPUs that a process can use, without CUDA.

    CUDA_VISIBLE_DEVICES lists ids, UUIDs or UUID prefixes. As in CUDA, the first unknown GPU ends
    the list. devices: the driver's folder, sorted as the ids (CUDA_DEVICE_ORDER=PCI_BUS_ID).

    Raises ContractError for a name that is no id and no UUID, and for a MIG part of a GPU.
    """
    folders = sorted(devices.iterdir()) if devices.is_dir() else []
    if not folders or (named := environment.get(CUDA_VISIBLE)) is None:
        return list(range(len(folders)))
    visible: list[int] = []
    for name in map(str.strip, named.split(",")):
        if name.removeprefix("-").isdecimal():
            found = [int(name)] if 0 <= int(name) < len(folders) else []
        elif name.startswith("GPU-"):
            uuids = enumerate(map(_uuid, folders))
            found = [index for index, uuid in uuids if uuid.startswith(name)]
        elif name:
            part = "a part of a GPU (MIG), and servers take whole ones"
            raise ContractError(
                CUDA_VISIBLE,
                f"{name!r} is {part if name.startswith('MIG-') else 'no id and no UUID of a GPU'}",
                "Name GPUs by id, as in 0,1, or by UUID, as nvidia-smi -L shows them",
            )
        else:
            continue
        if len(found) != 1:
            break
        visible += found
    return visible


def _uuid(folder: Path) -> str:
    """Return the UUID in a GPU's folder of the driver; empty if it is unknown."""
    try:
        lines = (folder / "information").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return fields.get("GPU UUID", "").strip()


@dataclass(frozen=True)
class GpuMemory:
    """A GPU and its memory in use by all processes; index: its id on this machine."""

    index: int
    uuid: str
    used_mib: int
    total_mib: int


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU; used_mib: None if the driver does not report it."""

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

    def faults(self, gpus: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield the id and a sentence for each of these GPUs that other processes use."""
        for gpu in self.gpus:
            users = [process for process in self.processes if process.gpu_uuid == gpu.uuid]
            if gpu.index in gpus and (users or gpu.used_mib > IDLE_MIB):
                text = " and ".join(map(str, users)) or (
                    "a process that cannot be seen from here, such as one in another container "
                    f"({in_gib(gpu.used_mib)} of {in_gib(gpu.total_mib)})"
                )
                yield gpu.index, f"GPU {gpu.index} is used by {text}"


def query_gpu_use(program: str = "nvidia-smi") -> GpuUse | None:
    """Return the current use of GPUs; None, with a warning in the log, if `program` fails."""
    try:
        gpus = _query(program, "--query-gpu=index,uuid,memory.used,memory.total")
        processes = _query(program, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
        return GpuUse(parse_gpus(gpus), parse_processes(processes))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("%s does not show which processes use the GPUs (%s)", program, error)
        return None


def uuids_of(gpus: Sequence[int], use: GpuUse | None) -> list[str]:
    """Return the UUIDs of these GPUs; empty unless every one of them is known."""
    known = {gpu.index: gpu.uuid for gpu in use.gpus} if use is not None else {}
    return [known[gpu] for gpu in gpus] if known.keys() >= set(gpus) else []


def parse_gpus(text: str) -> list[GpuMemory]:
    """Parse lines such as `0, GPU-6f1c, 1024, 81559` (MiB). Raises ValueError for others."""
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [GpuMemory(int(i), uuid, int(used), int(total)) for i, uuid, used, total in rows]


def parse_processes(text: str) -> list[GpuProcess]:
    """Parse lines such as `GPU-6f1c, 4242, /usr/bin/python, 40960` (MiB).

    The name may hold commas; the memory may be `[N/A]`. Raises ValueError for others.
    """
    processes = []
    for line in text.splitlines():
        uuid, pid, rest = line.split(",", maxsplit=2)
        name, _, memory = rest.rpartition(",")
        used = int(memory) if memory.strip().isdecimal() else None
        processes.append(GpuProcess(uuid.strip(), int(pid), name.strip(), used))
    return processes


def available_ram() -> float | None:
    """Return the bytes that are available without swapping; None if unknown."""
    try:
        text = Path("/proc/meminfo").read_text()
        lines = dict(line.split(":", 1) for line in text.splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024.0
    except (OSError, KeyError, ValueError):
        return None


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in distributions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def in_gib(mib: int) -> str:
    """Return MiB as text such as `39.6 GiB`."""
    return f"{mib / 1024:.1f} GiB"


def _query(program: str, query: str) -> str:
    command = [program, query, "--format=csv,noheader,nounits"]
    return subprocess.check_output(
        command, stderr=subprocess.PIPE, text=True, timeout=QUERY_TIMEOUT_S
    ).strip()


_ANY_PORT = 9


def address_towards(host: str) -> str:
    """Return this machine's IP address on the route to `host`.

    Raises OSError if there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))  # UDP: chooses a route, sends nothing
        address: str = probe.getsockname()[0]
    return address


_PR_SET_PDEATHSIG = 1


def signal_at_death_of(parent_pid: int, number: signal.Signals) -> None:
    """Make the kernel send this process a signal when its parent, `parent_pid`, dies.

    Exits at once if the parent is already dead.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os._exit(1)
