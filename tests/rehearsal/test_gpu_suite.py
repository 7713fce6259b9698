"""`tests/gpu` on a machine without a GPU: it is collected, skipped, and rehearsed."""

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
    *_, last = re.findall(r"^(\d+ (?:failed|passed|skipped|tests)\b.*) in [\d.]+s", output, re.M)
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}


# Tests that start servers, which compile what they run and capture graphs on a GPU.
SERVERS = ("test_gpu_logprobs", "test_gpu_sleep", "test_gpu_transfer", "test_split")


def test_every_test_is_sound_up_to_its_first_use_of_a_gpu() -> None:
    """Imports, fixtures and all that a test does before."""
    status, listed = run("-p", "tests.rehearsal.timeouts", "tests/gpu", "--collect-only")
    assert status == 0, listed
    timeouts = re.findall(r"^timeout (\d+) tests/gpu/(\w+)\.py::", listed, re.M)
    assert {name for _, name in timeouts} >= set(SERVERS)
    assert all(int(seconds) > 900 for seconds, name in timeouts if name in SERVERS)
    status, output = run("tests/gpu", ROLLMATCH_REHEARSE_GPU="1")
    assert status == 0, output
    assert counts(output)["passed"] == counts(listed)["tests"] > 15
    assert "skipped" not in counts(output)


def test_every_test_is_skipped_where_gpus_are_too_few() -> None:
    status, output = run("tests/gpu", "-rs")
    assert status == 0, output
    assert not counts(output).keys() & {"passed", "failed"}
    assert {int(number) for number in re.findall(r"needs (\d) GPU", output)} == {1, 2, 3, 4}


def test_a_test_runs_in_a_pytest_of_its_own() -> None:
    """There it finds that there is no GPU; here eight seem to be there."""
    status, output = run("-p", "tests.rehearsal.eight_gpus", "tests/gpu/test_offload.py")
    assert status == 1, output
    assert "1 failed" in output
    assert "InItsOwnProcess" not in output
    assert "NVIDIA driver" in output
