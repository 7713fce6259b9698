"""Whether the GPUs the server is to take are free (SRV-04)."""

from collections.abc import Sequence

from shared_contracts.errors import ContractError
from shared_contracts.gpu_use import IDLE_MIB, GpuUse, in_gib


def check_unused(gpus: Sequence[int], use: GpuUse) -> None:
    """Raises ContractError naming what holds one of `gpus`, or that it cannot be seen."""
    for gpu in use.gpus:
        if gpu.index not in gpus:
            continue
        holders = [process for process in use.processes if process.gpu_uuid == gpu.uuid]
        if holders:
            raise _occupied(f"GPU {gpu.index} is used by {' and '.join(map(str, holders))}")
        if gpu.used_mib > IDLE_MIB:
            raise _occupied(
                f"{in_gib(gpu.used_mib)} of GPU {gpu.index} are used by a process that cannot "
                "be seen from here, such as one in another container"
            )


def _occupied(found: str) -> ContractError:
    return ContractError("gpus", found, "Stop it, name other GPUs, or give --share-gpus")
