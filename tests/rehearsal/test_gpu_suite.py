"""`tests/gpu` on a machine without a GPU: its tests are rehearsed, and skipped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.req("FULL-10"),
    pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has GPUs"),
]

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Status and output of a pytest of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--numprocesses=0", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTEST_ADDOPTS": ""} | environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def counts(output: str) -> dict[str, int]:
    """Of pytest's last line, such as `2 failed, 3 passed in 4.18s`."""
    *_, last = re.findall(r"^(\d+ (?:failed|passed|skipped)\b.*) in [\d.]+s", output, re.M)
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}


def test_every_test_for_gpus_passes_up_to_its_first_use_of_a_gpu() -> None:
    """Imports, fixtures and all that a test does before. Else it is skipped."""
    status, output = run("tests/gpu", ROLLMATCH_REHEARSE_GPU="1")
    assert status == 0, output
    rehearsed = counts(output)
    assert rehearsed["passed"] > 15
    assert "skipped" not in rehearsed
    status, output = run("tests/gpu", "-rs")
    assert status == 0, output
    assert counts(output)["skipped"] == rehearsed["passed"]
    assert {int(number) for number in re.findall(r"needs (\d) GPU", output)} == {1, 2, 3, 4}
