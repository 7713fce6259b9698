"""Numbers of the data sheets of GPUs, by name.

Sources, all of NVIDIA: A100 data sheet (2021), H100 data sheet (2023), H200 data sheet (2024), L40S
data sheet (2023), Ada GPU architecture paper, appendix A (RTX 4090).
"""

from dataclasses import dataclass

from shared_contracts.checkpoints import GIB
from shared_contracts.errors import ContractError

GB = 10**9
TERA = 10**12


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. flops: bfloat16 operations of matrix products a second, without sparsity.

    bandwidth: of the memory. link: to the other GPUs of the node, by NVLink, or PCIe without it.
    host: to host memory, by PCIe with 16 lanes. All three are bytes a second in one direction.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    link: float
    host: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40", 40 * GIB, 312 * TERA, 1555 * GB, 300 * GB, 32 * GB),
        Gpu("A100-80", 80 * GIB, 312 * TERA, 2039 * GB, 300 * GB, 32 * GB),
        Gpu("H100", 80 * GIB, 989 * TERA, 3350 * GB, 450 * GB, 64 * GB),
        Gpu("H200", 141 * GB, 989 * TERA, 4800 * GB, 450 * GB, 64 * GB),
        Gpu("L40S", 48 * GIB, 362 * TERA, 864 * GB, 32 * GB, 32 * GB),
        Gpu("RTX4090", 24 * GIB, 165 * TERA, 1008 * GB, 32 * GB, 32 * GB),
    )
}


def gpu_named(name: str) -> Gpu:
    """Return the GPU of a `--gpu` option; raises ContractError for an unknown name."""
    gpu = GPUS.get(name.upper().replace("RTX-", "RTX").replace("RTX ", "RTX"))
    if gpu is None:
        raise ContractError("--gpu", repr(name), f"Use one of: {', '.join(GPUS)}")
    return gpu


def gpu_of_device(name: str, memory: int) -> Gpu | None:
    """Return the GPU with CUDA's `name` and about `memory` bytes; None for an unknown one."""
    plain = name.upper().replace(" ", "")
    alike = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in plain]
    near = [gpu for gpu in alike if abs(memory / gpu.memory - 1) < 0.15]
    return near[0] if near else None
