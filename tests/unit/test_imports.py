"""What imports what: heavy packages are loaded late, and the import contracts find violations."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "vllm", "transformers", "fastapi"}

WITHOUT_TORCH = [
    "learner.config",
    "learner.types",
    "learner.rollout.distribution",
    "learner.stages.formats.coord_json",
    "learner.stages.matching",
    "learner.stages.packing",
    "learner.stages.schedule",
    "learner.stages.targets",
    "learner.stages.tokens",
    "learner.stages.transport_plan",
]


def loaded_by(modules: list[str], packages: set[str] = HEAVY) -> set[str]:
    """Those of `packages` that a fresh interpreter has loaded after it imported `modules`."""
    program = f"import sys, {', '.join(modules)}\nprint(*{packages!r} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return set(done.stdout.split())


@pytest.mark.req("ARCH-01")
def test_shared_contracts_loads_pydantic_alone() -> None:
    files = (ROOT / "shared_contracts").glob("*.py")
    modules = [f"shared_contracts.{path.stem}" for path in files if path.stem != "__init__"]
    assert "shared_contracts.errors" in modules
    others = {"httpx", "learner", "numpy", "pydantic", "rollout_server", "ruamel", "yaml"}
    assert loaded_by(modules, HEAVY | others) == {"pydantic"}


@pytest.mark.req("ARCH-01")
def test_the_server_loads_vllm_with_its_engines_alone() -> None:
    modules = ["rollout_server.engines.vllm", "rollout_server.http.app", "rollout_server.serve"]
    assert loaded_by(modules, {"vllm"}) == set()


@pytest.mark.req("ARCH-02")
@pytest.mark.scenario("Shared parsing contract is importable without trainer class dependency")
def test_the_stages_load_without_torch() -> None:
    assert loaded_by(WITHOUT_TORCH) == set()
