"""The house itself: who may import whom, what loads without torch, how long and how told it is."""

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
    "learner.coords",
    "learner.matching",
    "learner.packing",
    "learner.parsing",
    "learner.schedule",
    "learner.serialize",
    "learner.targets",
    "learner.transport_plan",
    "learner.types",
    "learner.stages.coords",
    "learner.stages.tokens",
    "learner.stages.formats.coord_json",
    "learner.stages.matching",
    "learner.stages.transport_plan",
    "learner.stages.targets",
    "learner.stages.packing",
    "learner.rollout.distribution",
    "learner.rollout.seeds",
    "learner.stages.schedule",
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
        ("learner/types.py", "import rollout_server.settings.options", "The two programs meet on"),
        ("rollout_server/settings/options.py", "import learner.types", "The two programs meet on"),
        (
            "learner/stages/formats/coord_json.py",
            "import learner.stages.matching",
            "The stages of a sample",
        ),
        (
            "learner/stages/targets.py",
            "def f():\n    import learner.training.train",
            "The rooms of the learner",
        ),
        ("learner/stray.py", "", "The rooms of the learner"),
        ("learner/stages/stray.py", "", "The stages of a sample"),
        ("rollout_server/stray.py", "", "The rooms of the server"),
        (
            "rollout_server/engines/engine_protocol.py",
            "import rollout_server.serving.pool",
            "The rooms of the server",
        ),
        ("rollout_server/serving/infer.py", "import vllm", "vLLM stays inside"),
        (
            "rollout_server/runtime/concurrency.py",
            "import rollout_server.engines.vllm.engine",
            "No module knows an engine",
        ),
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


# --- measures: what a reader can hold in mind, and what no part of the house does

TREES = (*PACKAGES, "benchmarks", "scripts", "tests")
LONGEST_FILE, LONGEST_FUNCTION = 600, 100
USUAL_FILE, USUAL_FUNCTION = 500, 50
# What is longer has a docstring, if its name is public; in the packages both sides meet on, and
# in the server, all else that can be imported from a module has one, too.
SELF_EXPLAINING = 20
FULLY_TOLD = ("shared_contracts", "rollout_server")

# Handlers of any error that do not raise it again, by file and function.
SWALLOWS = {
    # monitoring must not end a run
    "learner/analysis/evaluation/folder.py:_keep": "a run does not end because of its pages",
    "learner/analysis/report/run_page.py:_write": "a run does not end because of its report",
    "learner/training/run_log.py:guarded": "a run does not end because of its tracker",
    # handed over to whoever waits for it
    "learner/training/asynchronous_rollouts.py:_prefetch": "raised in the learner's own thread",
    "learner/runs/checkpoint.py:attempted": "raised once every file was tried",
    "learner/training/synchronous_rollouts.py:produce": "raised where the next item is asked for",
    "learner/rollout/parallel_calls.py:_run": "raised by whoever waits for the calls",
    "shared_contracts/rendezvous.py:_settle": "raised by the rank that waits for NCCL",
    "rollout_server/serve.py:_start": "the process ends with it",
    "rollout_server/engines/vllm/worker_extension.py:weight_phase": "vLLM loses who raises",
    # whatever it is, it has an answer
    "learner/rollout/sync/push.py:push": "SYNC-01: a push of the adapter fell back to a full one",
    "rollout_server/engines/vllm/load_plan.py:load": "what a loader raises is a manifest's fault",
}


def sources(tree: str) -> list[Path]:
    return sorted((ROOT / tree).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def percentile_95(lengths: list[int]) -> int:
    return sorted(lengths)[int(0.95 * len(lengths))]


@pytest.mark.parametrize("tree", TREES)
def test_no_file_and_no_function_is_long(tree: str) -> None:
    files = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(tree)
    }
    lengths = {
        f"{path.relative_to(ROOT)}:{function.name}": length(function)
        for path in sources(tree)
        for function in functions(parsed(path))
    }
    assert {name: n for name, n in files.items() if n > LONGEST_FILE} == {}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FUNCTION} == {}
    assert percentile_95(list(files.values())) <= USUAL_FILE
    assert percentile_95(list(lengths.values())) <= USUAL_FUNCTION


def calls_by_name(tree: ast.AST) -> list[int]:
    """Lines where an attribute is called whose name is only known when it runs."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(found := node.func, ast.Call)
        and isinstance(found.func, ast.Name)
        and found.func.id == "getattr"
        and not isinstance(found.args[1], ast.Constant)
    ]


@pytest.mark.parametrize("tree", PACKAGES)
def test_nothing_is_called_by_a_computed_name(tree: str) -> None:
    found = {str(path): calls_by_name(parsed(path)) for path in sources(tree)}
    assert {path: lines for path, lines in found.items() if lines} == {}


def swallowing(node: ast.AST, function: str = "") -> Iterator[str]:
    """Functions that handle any error whatever and do not end by raising one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from swallowing(child, child.name)
            continue
        if isinstance(child, ast.ExceptHandler) and swallows_all(child):
            yield function
        yield from swallowing(child, function)


def swallows_all(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    broad = handler.type is None or not names.isdisjoint({"Exception", "BaseException"})
    return broad and not isinstance(handler.body[-1], ast.Raise)


def test_every_handler_that_swallows_any_error_has_its_reason() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{function}"
        for package in PACKAGES
        for path in sources(package)
        for function in swallowing(parsed(path))
    }
    assert found == SWALLOWS.keys()


Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, Named]]:
    """Public classes and functions, and the methods of such classes, by dotted name."""
    for node in body:
        if isinstance(node, Named) and not node.name.startswith("_"):
            yield within + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{within}{node.name}.")


def untold(path: Path, everything: bool) -> list[str]:
    """Public names without a docstring; `everything`: also short ones, but for methods."""
    return [
        name
        for name, node in public(parsed(path).body)
        if not ast.get_docstring(node)
        and (length(node) > SELF_EXPLAINING or (everything and "." not in name))
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_and_what_its_name_does_not_explain_has_a_docstring(package: str) -> None:
    files = [path for path in sources(package) if path.name != "__main__.py"]
    silent = [path for path in files if (tree := parsed(path)).body and not ast.get_docstring(tree)]
    assert silent == []
    found = {str(path): untold(path, package in FULLY_TOLD) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("getattr(a, name)(1)", [1]),
        ("getattr(a, 'name')(1)", []),
        ("getattr(a, name)", []),
    ],
)
def test_a_call_by_a_computed_name_is_seen(source: str, found: list[int]) -> None:
    assert calls_by_name(ast.parse(source)) == found


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        ("except: pass", ["f"]),
        ("except (OSError, Exception) as e: log(e)", ["f"]),
        ("except BaseException: raise", []),
        ("except Exception as e: raise ValueError from e", []),
        ("except OSError: pass", []),
    ],
)
def test_a_handler_that_swallows_any_error_is_seen(handler: str, found: list[str]) -> None:
    body = f"def outer():\n def f():\n  try: g()\n  {handler}\n"
    assert list(swallowing(ast.parse(body))) == found
