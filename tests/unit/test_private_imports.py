"""scripts/private_imports: underscore names stay in their module."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "private_imports"


def private_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, root], capture_output=True, text=True, check=False
    )


def check_source(root: Path, source: str) -> subprocess.CompletedProcess[str]:
    (root / "learner").mkdir()
    (root / "learner" / "thing.py").write_text(source)
    return private_imports(root)


@pytest.mark.req("ARCH-01")
def test_no_underscore_name_crosses_a_module_of_this_project() -> None:
    done = private_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.req("ARCH-01")
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from learner.types import _secret", "learner.types._secret"),
        ("from learner._hidden import thing", "learner._hidden.thing"),
        ("import learner._hidden", "learner._hidden"),
        ("from .types import _secret as fine", "types._secret"),
        ("def f():\n    from learner.types import _secret", "learner.types._secret"),
        ("from learner import types\ntypes._secret()", "types._secret"),
        ("import learner.types as t\nx = t._secret", "t._secret"),
        ("import learner.types\nlearner.types._secret", "learner.types._secret"),
    ],
)
def test_a_private_name_of_another_module_is_found(tmp_path: Path, source: str, name: str) -> None:
    done = check_source(tmp_path, source)
    assert done.returncode == 1
    assert f"private name {name} is taken" in done.stdout
    assert "learner/thing.py:" in done.stdout


@pytest.mark.req("ARCH-01")
@pytest.mark.parametrize(
    "source",
    [
        "# from learner.types import _secret",
        "text = 'from learner.types import _secret'",
        '"""\nfrom learner.types import _secret\n"""',
        "from __future__ import annotations",
        "from learner import __version__",
        "import os\nos._exit(0)",
        "class A:\n    def f(self):\n        return self._x",
        "def _helper(): ...\n_helper()",
        "from learner.types import Sample as _Sample",
    ],
)
def test_text_and_names_of_its_own_are_left_alone(tmp_path: Path, source: str) -> None:
    done = check_source(tmp_path, source)
    assert done.returncode == 0, done.stdout
