"""A push of a full-size model fills every parameter of vLLM's model, and no other one is sent."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Parameters in billions, and whether the head is tied.
SIZES = {
    "2b": (2.13, True),
    "8b": (8.77, False),
    "30b-a3b": (31.07, False),
    "2.5-7b": (8.29, False),
}
HEAD = ["language_model.lm_head"]


@pytest.mark.req("SYNC-02", "SYNC-05", "FULL-10")
def test_every_parameter_has_its_place(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.rehearsal.full_size_plans"]
    done = subprocess.run(
        [*command, str(tmp_path), *SIZES],
        cwd=ROOT,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    pushes: dict[str, dict[str, Any]] = {line["size"]: line for line in lines}
    for size, (billions, tied) in SIZES.items():
        found = pushes[size]
        assert found["expected"], f"{size}: the manifest is the one that a server checks"
        assert found["unfilled"] == (HEAD if tied else []), size
        assert found["bytes"] / 2e9 == pytest.approx(billions, rel=0.01), size
