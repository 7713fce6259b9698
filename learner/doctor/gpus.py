"""GPUs of the learner: whether they are free, and no server's."""

from collections.abc import Mapping, Sequence

from learner.doctor.findings import Finding, ok, skipped
from learner.rollout.colocate import CUDA_VISIBLE
from shared_contracts.gpu_use import IDLE_MIB, GpuUse, in_gib
from shared_contracts.server_info import Info

CHECK = "gpus"


def overlap(visible: Sequence[int], here: str, servers: Mapping[str, Info]) -> list[Finding]:
    """GPUs that both sides take. here: this machine's name. servers: by their URL."""
    findings = []
    for url, info in servers.items():
        shared = sorted(set(visible) & set(info.gpus)) if info.host == here else []
        if shared:
            found = f"GPU {', '.join(map(str, shared))} is this server's, and the learner sees it"
            do = f"Set {CUDA_VISIBLE} to other GPUs, or give the server others (--gpus)"
            findings.append(Finding(CHECK, url, "fail", found, do))
    return findings


def learners(visible: Sequence[int], use: GpuUse | None) -> list[Finding]:
    """What the learner's GPUs are used for now.

    visible: what CUDA_VISIBLE_DEVICES leaves of those that the machine has.
    use: None where nvidia-smi does not tell.
    """
    if not visible:
        return [ok(CHECK, "none is visible here: the learner trains on the CPU")]
    shown = ", ".join(map(str, visible))
    if use is None:
        return [skipped(CHECK, f"GPU {shown}: waits for an nvidia-smi that tells who uses it")]
    findings = [finding for gpu in visible if (finding := _use_of(gpu, use)) is not None]
    return findings or [ok(CHECK, f"GPU {shown} is free")]


def _use_of(index: int, use: GpuUse) -> Finding | None:
    gpu = next((gpu for gpu in use.gpus if gpu.index == index), None)
    if gpu is None:
        return None
    holders = [process for process in use.processes if process.gpu_uuid == gpu.uuid]
    if not holders and gpu.used_mib <= IDLE_MIB:
        return None
    by = " and ".join(map(str, holders)) or "a process that cannot be seen from here"
    found = f"{in_gib(gpu.used_mib)} of {in_gib(gpu.total_mib)} are used by {by}"
    do = f"Stop it, or set {CUDA_VISIBLE} to other GPUs"
    return Finding(CHECK, f"GPU {index}", "warn", found, do)
