"""`tests/gpu` on a machine without a GPU: its tests are rehearsed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.req("FULL-10"),
    pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has GPUs"),
]

ROOT = Path(__file__).parents[2]


def test_every_test_for_gpus_passes_up_to_its_first_use_of_a_gpu() -> None:
    """Imports, fixtures and all that a test does before."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--numprocesses=0", "tests/gpu"],
        cwd=ROOT,
        env=os.environ | {"PYTEST_ADDOPTS": "", "ROLLMATCH_REHEARSE_GPU": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"^(\d+) passed in [\d.]+s", done.stdout, re.M)
    assert int(passed) > 15
