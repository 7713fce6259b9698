"""The house itself: who may import whom, what loads without torch, what files may hold."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared_contracts", "rollout_server", "learner")
HEAVY = ("torch", "vllm", "transformers", "fastapi")

STAGES_WITHOUT_TORCH = (
    "learner.types",
    "learner.coords",
    "learner.tokens",
    "learner.parsing",
    "learner.serialize",
    "learner.matching",
    "learner.transport_plan",
    "learner.targets",
    "learner.packing",
    "learner.rollout.distribution",
    "learner.rollout.seeds",
    "learner.schedule",
    "learner.config",
    "shared_contracts.repeat_guard",
)
COMMAND_LINES = ("learner.cli", "rollout_server.cli")


def loaded_after_importing(modules: list[str]) -> dict[str, list[str]]:
    """Heavy packages in a fresh interpreter after each of `modules`, imported in turn."""
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    print(name, *[heavy for heavy in {HEAVY!r} if heavy in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: heavy for name, *heavy in map(str.split, done.stdout.splitlines())}


def modules_of(package: str) -> list[str]:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    return [name.removesuffix(".__init__") for name in names]


def imported_packages(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )


@pytest.mark.req("ARCH-01")
def test_shared_contracts_imports_pydantic_and_the_standard_library_only() -> None:
    allowed = {*sys.stdlib_module_names, "pydantic", "shared_contracts"}
    for path in (ROOT / "shared_contracts").rglob("*.py"):
        assert set(imported_packages(path)) <= allowed, path


@pytest.mark.req("ARCH-01")
def test_importing_shared_contracts_loads_nothing_heavy() -> None:
    modules = modules_of("shared_contracts")
    assert "shared_contracts.errors" in modules
    assert loaded_after_importing(modules) == {name: [] for name in modules}


@pytest.mark.req("ARCH-02")
def test_the_stages_load_without_torch() -> None:
    loaded = loaded_after_importing(list(STAGES_WITHOUT_TORCH))
    assert loaded == {name: [] for name in STAGES_WITHOUT_TORCH}


@pytest.mark.parametrize("module", COMMAND_LINES)
def test_command_lines_load_nothing_heavy(module: str) -> None:
    assert loaded_after_importing([module]) == {module: []}


@pytest.mark.req("ARCH-01")
def test_the_import_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.req("ARCH-01")
@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("shared_contracts/errors.py", "import numpy", "shared_contracts needs pydantic alone"),
        ("learner/types.py", "import rollout_server.settings", "The two programs meet on"),
        ("rollout_server/settings.py", "import learner.types", "The two programs meet on"),
        ("learner/parsing.py", "import learner.matching", "request -> rollout -> parse"),
        ("learner/targets.py", "def f():\n    import learner.train", "request -> rollout -> parse"),
        ("learner/stray.py", "", "request -> rollout -> parse"),
    ],
)
def test_an_import_against_the_contracts_is_caught(
    tmp_path: Path, module: str, statement: str, contract: str
) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=lambda *_: ["__pycache__"])
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as source:
        source.write(f"\n{statement}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    assert any(line.startswith(contract) for line in broken), done.stdout


def test_an_import_in_a_comment_or_a_string_is_no_import(tmp_path: Path) -> None:
    source = tmp_path / "text.py"
    source.write_text("# import torch\n'import torch'\n'''\nimport torch\n'''\nimport json\n")
    assert list(imported_packages(source)) == ["json"]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_tracked_file_names_a_place_on_somebodys_machine_or_a_package_index() -> None:
    index_hosts = ["pypi." + "org", "python" + "hosted"]
    place = re.compile(
        rb"(?<![\w.}])/(?:root|work)/\w|" + "|".join(map(re.escape, index_hosts)).encode()
    )
    named = {str(path): place.findall(path.read_bytes()) for path in tracked_files()}
    assert {path: found for path, found in named.items() if found} == {}


def test_the_locked_requirements_are_hashed_and_hold_no_address() -> None:
    locks = list((ROOT / "requirements").glob("*.txt"))
    assert {lock.stem for lock in locks} == {"cpu", "cpu-dev", "gpu", "gpu-dev", "uv"}
    for lock in locks:
        text = lock.read_text()
        assert "://" not in text, lock
        assert not re.search(r"^\s*-(?!-hash=sha256:)", text, re.MULTILINE), lock
        pins = re.findall(r"^\S+==\S+.*\\\n\s+--hash=sha256:", text, re.MULTILINE)
        assert len(pins) == len(re.findall(r"^\w", text, re.MULTILINE)), lock
