"""What a push of a full-size model sends has a place in vLLM's model, parameter by parameter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Parameters in billions, and whether the head is the embedding.
SIZES = {
    "2b": (2.13, True),
    "4b": (4.44, True),
    "8b": (8.77, False),
    "30b-a3b": (31.07, False),
}
DENSE = ["2b", "4b", "8b"]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.rehearsal.full_size_plans",
            str(tmp_path_factory.mktemp("plans")),
            *SIZES,
        ],
        cwd=ROOT,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["size"]: line for line in lines}


@pytest.mark.req("SYNC-02", "SYNC-05", "FULL-10")
@pytest.mark.parametrize("size", SIZES)
def test_every_parameter_has_its_place(plans: dict[str, dict[str, Any]], size: str) -> None:
    found, (billions, tied) = plans[size], SIZES[size]
    assert found["faults"] == []
    assert found["planned"] == found["parameters"]
    assert found["bytes"] / 2e9 == pytest.approx(billions, rel=0.01)
    assert (found["tied"] > 0) == tied


@pytest.mark.req("ROLL-03")
@pytest.mark.parametrize("size", SIZES)
def test_the_model_has_tensors_that_neither_a_push_nor_level_2_of_a_sleep_keeps(
    plans: dict[str, dict[str, Any]], size: str
) -> None:
    """Every forward adds those of the deepstack to its layers; they are zero without an image."""
    assert "deepstack_input_embeds" in plans[size]["unsaved"]


@pytest.mark.req("SYNC-02")
@pytest.mark.parametrize("size", SIZES)
def test_a_model_with_adapters_sends_the_same_parameters(
    plans: dict[str, dict[str, Any]], size: str
) -> None:
    assert plans[size]["same_wrapped"]


@pytest.mark.req("SYNC-03", "FULL-10")
@pytest.mark.parametrize("size", DENSE)
def test_a_push_by_the_plan_takes_python_a_tenth_of_one_by_the_loaders(
    plans: dict[str, dict[str, Any]], size: str
) -> None:
    """Measured: 1 to 2 %. With no data, what is left is the work for each parameter."""
    assert min(plans[size]["replay_ms"]) < 0.1 * min(plans[size]["loaders_ms"])
