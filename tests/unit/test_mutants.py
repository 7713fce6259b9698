"""What `make mutants` changes, and the tests it runs, are there and meet (`[tool.mutmut]`)."""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTMUT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
CHANGED: list[str] = MUTMUT["only_mutate"]
RUN: list[str] = MUTMUT["pytest_add_cli_args_test_selection"]


def imported(path: Path) -> set[str]:
    """Modules that a file names in its imports, and the packages they are in."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            found |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return found


def test_every_module_that_is_changed_is_imported_by_a_test_that_is_run() -> None:
    tested = set().union(*(imported(ROOT / test) for test in RUN))
    for pattern in CHANGED:
        assert list(ROOT.glob(pattern)), f"{pattern} is no file"
        module = pattern.removesuffix(".py").removesuffix("/*").replace("/", ".")
        assert module in tested, f"no selected test imports {module}"


def test_every_test_of_a_module_that_is_changed_is_run() -> None:
    of_changed = {f"test_{Path(pattern).stem}.py" for pattern in CHANGED}
    there = {path.name for path in (ROOT / "tests/unit").glob("test_*.py")}
    assert {f"tests/unit/{name}" for name in of_changed & there} <= set(RUN)
