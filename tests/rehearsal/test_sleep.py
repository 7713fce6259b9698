"""What an engine has of its GPU's memory while a learner uses it, by vLLM's own sleep mode.

Each text is what the weights, a tensor that no push brings, and the KV cache hold; and whether the
scheduler runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.req("ROLL-03", "FULL-06", "FULL-10")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scenes() -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.faked_sleep"],
        cwd=ROOT,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_sleeping_engine_has_nothing_of_the_gpu(scenes: list[dict[str, Any]]) -> None:
    steps, *_ = scenes
    assert steps["join_group"] == "0 z k runs"
    assert steps["asleep"] == steps["asleep twice"] == "nothing nothing nothing paused"


def test_a_push_has_the_weights_and_no_cache_until_it_is_finished(
    scenes: list[dict[str, Any]],
) -> None:
    """The cache that comes back is empty, and nothing is found in it: the index was reset."""
    steps, *_ = scenes
    phases = ("open_weight_update", "receive_weights", "complete_load", "read_back")
    before, coming = "1 z nothing paused", "2 z nothing paused"  # of the second push
    assert [steps[phase] for phase in phases] == [before, before, coming, coming]
    assert steps["pushed"] == "1 z garbage runs"
    assert steps["pushed again"] == "2 z garbage runs"
    assert steps["resets"]


def test_without_a_push_the_weights_of_before_come_back(scenes: list[dict[str, Any]]) -> None:
    steps, *_ = scenes
    assert steps["woken"] == "2 z garbage runs"


@pytest.mark.req("SYNC-04")
def test_an_engine_that_cannot_have_its_memory_back_is_given_up(
    scenes: list[dict[str, Any]],
) -> None:
    _, no_memory, _ = scenes
    assert no_memory["refusal"].endswith(
        "replica 0 did not move its memory: CUDA Error: out of memory"
    )
    assert (no_memory["state"], no_memory["dead"]) == ("POISONED", True)


def test_level_2_would_lose_what_no_push_brings(scenes: list[dict[str, Any]]) -> None:
    """So level 1 is used. Where this fails, vLLM keeps more, and level 2 can be looked at again."""
    *_, level_2 = scenes
    assert level_2["pushed"] == "1 garbage garbage runs"
