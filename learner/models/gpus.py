"""GPUs by name: what their data sheets say.

Each number is of the dense 16-bit matrix product without sparsity, and of memory and links in
bytes. Sources, all of NVIDIA: A100 data sheet (2021), H100 data sheet (2023), H200 data sheet
(2024), L40S data sheet (2023), Ada GPU architecture paper, appendix A (RTX 4090). A link is what
one GPU sends to the others of its node, in one direction: NVLink, or PCIe where there is none. The
way to the host is PCIe with 16 lanes, in one direction.
"""

from dataclasses import dataclass

from shared_contracts.errors import ContractError

GB = 10**9
GIB = 2**30
TERA = 10**12


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. flops: dense bfloat16 a second. bandwidth, link, host: bytes a second."""

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
    """Raises ContractError for a name that is not known."""
    found = GPUS.get(name.upper().replace("RTX-", "RTX").replace("RTX ", "RTX"))
    if found is None:
        raise ContractError("--gpu", repr(name), f"Use one of: {', '.join(GPUS)}")
    return found


def gpu_of_device(name: str, memory: int) -> Gpu | None:
    """The GPU that CUDA calls `name` and that has so many bytes; None where it is not known."""
    plain = name.upper().replace(" ", "")
    alike = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in plain]
    near = [gpu for gpu in alike if abs(memory / gpu.memory - 1) < 0.15]
    return near[0] if near else None
