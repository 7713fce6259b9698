"""scripts/setup: what cannot work is refused before anything is touched; what it installs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup"


def setup(
    variant: str, script: Path = SCRIPT, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script, variant],
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


@pytest.mark.parametrize(
    ("made", "wanted", "used"),
    [("cpu-dev", "cpu", "cpu-dev"), ("cpu", "cpu", "cpu"), ("gpu-dev", "cpu", "cpu")],
)
def test_an_environment_that_is_out_of_date_keeps_its_development_tools(
    tmp_path: Path, made: str, wanted: str, used: str
) -> None:
    shutil.copytree(SCRIPT.parents[1] / "requirements", tmp_path / "requirements")
    (tmp_path / "pyproject.toml").touch()
    script = tmp_path / "scripts" / "setup"
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "set-up").write_text(f"{tmp_path}/.venv {made}\nof another day\n")
    python = tmp_path / "python"  # goes as far as the message, and fails to make an environment
    python.write_text("#!/bin/sh\ncase $2 in venv) exit 7 ;; pip) ;; *) echo 3.12 ;; esac\n")
    python.chmod(0o755)
    done = setup(wanted, script, PYTHON=str(python))
    assert f"set-up: .venv for {used} with {python} (Python 3.12)" in done.stdout
    assert done.returncode == 7
