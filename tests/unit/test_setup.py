"""scripts/setup refuses what cannot work before it touches anything."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup"


def setup(variant: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, variant],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def fake_python(folder: Path, version: str) -> str:
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("version", ["2.7", "3.10", "3.13"])
def test_a_python_of_another_version_is_refused(tmp_path: Path, version: str) -> None:
    python = fake_python(tmp_path, version)
    done = setup("cpu", PYTHON=python)
    assert done.returncode == 2
    assert f"PYTHON: {python} is {version}; none is 3.11 or 3.12." in done.stderr
    assert "PYTHON=/path/to/python3.12 make test" in done.stderr


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = setup("cpu", PYTHON=str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert "nothing is absent; none is 3.11 or 3.12." in done.stderr


def test_an_unknown_set_of_requirements_is_refused() -> None:
    done = setup("tpu")
    assert done.returncode == 2
    assert "EXTRA: 'tpu' is not a set of requirements. Use EXTRA=cpu or EXTRA=gpu." in done.stderr
