"""GPUs of the learner: whether they are free, and no server's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.doctor.findings import Finding, ok, skipped
from shared_contracts.gpu_use import CUDA_VISIBLE, IDLE_MIB, GpuUse, in_gib
from shared_contracts.server_info import Info

CHECK = "gpus"
_APART = f"Set {CUDA_VISIBLE} to other GPUs, or give the server others (--gpus)"


@dataclass(frozen=True)
class Here:
    """The learner's side. host: this machine's name. visible: its GPUs; none on the CPU.

    use: None where nvidia-smi does not tell.
    """

    host: str
    visible: Sequence[int]
    use: GpuUse | None

    @property
    def uuids(self) -> dict[str, int]:
        """The visible GPUs by their UUID, as far as they are known."""
        gpus = self.use.gpus if self.use is not None else []
        return {gpu.uuid: gpu.index for gpu in gpus if gpu.index in self.visible}


def overlap(here: Here, servers: Mapping[str, Info]) -> list[Finding]:
    """Of each server by its URL, whether it takes a GPU of the learner's; nothing on the CPU."""
    return [_beside(here, url, info) for url, info in servers.items() if here.visible]


def _beside(here: Here, url: str, info: Info) -> Finding:
    """Numbers of GPUs mean nothing across containers, whatever they call their machine."""
    ours = here.uuids
    if not info.gpus:
        return skipped(CHECK, "it names no GPUs of its own: it has none, or Ray places it", url)
    if ours and info.gpu_uuids:
        shared = sorted(ours[uuid] for uuid in ours.keys() & set(info.gpu_uuids))
        if not shared:
            return ok(CHECK, "none of its GPUs is the learner's (by their UUIDs)", url)
        found = f"GPU {', '.join(map(str, shared))} is this server's, and the learner sees it"
        return Finding(CHECK, url, "fail", found, _APART)
    unknown = "a side has no nvidia-smi that tells the UUIDs of its GPUs"
    same = sorted(set(here.visible) & set(info.gpus)) if info.host == here.host else []
    if not same:
        return skipped(CHECK, f"its GPUs were not compared with the learner's: {unknown}", url)
    found = (
        f"both sides name GPU {', '.join(map(str, same))} of {here.host}; in containers these may "
        f"be different ones, and {unknown}"
    )
    return Finding(CHECK, url, "warn", found, _APART)


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
