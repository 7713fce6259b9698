"""Scenarios of a run that starts its rollout server itself, on a real one (seeds 000, 001).

The untrained model repeats itself, so the guard ends its answers.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, parse_config
from learner.data.toy import make_data
from learner.models.toy import make_model
from learner.runs.rollout_log import StepAnswer
from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig
from tests.integration.alignment import check_alignment, logged_answers
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.slow

LEARNER = [sys.executable, "-c", "from learner.cli import main; main()"]
STEPS, SAMPLES = 2, 4
GUARD = RepeatTerminateConfig(
    enabled=True, min_new_tokens=2, max_consecutive_token_repeats=3, ngram_size=2, ngram_repeats=2
)
MAX_NEW_TOKENS = 24


@dataclass(frozen=True)
class Run:
    """A finished run: its config and its logs."""

    config: dict[str, Any]
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "step/channel_b" in line]

    @property
    def answers(self) -> list[StepAnswer]:
        return logged_answers(self.folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("colocated")
    make_model(folder / "model", seed=0)
    data = make_data(folder / "data", train=8, val=1, seed=0)
    mapping = small_mapping(
        folder / "model",
        data,
        folder / "run",
        training={"max_steps": STEPS, "save_steps": STEPS, "effective_batch_size": SAMPLES},
        stage2_ab={"schedule": {"b_ratio": 1.0}},
        rollout_matching={
            "rollout_backend": "vllm",
            "max_new_tokens": MAX_NEW_TOKENS,
            "repeat_terminate": GUARD.model_dump(),
            "offload": {"enabled": True, "offload_model": True, "offload_optimizer": True},
        },
    )
    mapping["rollout_matching"]["vllm"] = {"mode": "colocate", "max_model_len": 640}
    file = folder / "run.yaml"
    file.write_text(dump_mapping(mapping))
    done = subprocess.run(
        [*LEARNER, "train", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(mapping, folder / "run")


def triggers_at(ids: list[int]) -> int | None:
    """Number of `ids` after which the guard triggers. None of its rules counts objects."""
    guard = RepeatGuard(GUARD, [])
    return next((taken for taken, each in enumerate(ids, 1) if guard.push(each)), None)


@pytest.mark.req("ROLL-01", "ROLL-03", "CHB-01")
def test_vllm_backend_produces_token_ids_suitable_for_strict_alignment(run: Run) -> None:
    assert len(run.answers) == STEPS * SAMPLES
    check_alignment(parse_config(run.config), run.answers)


@pytest.mark.req("ROLL-03")
def test_offload_context_does_not_break_the_training_step(run: Run) -> None:
    """Each step changes weights, and the next one pushes them."""
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in run.metrics)
    versions = [line["sync/weights_version"] for line in run.metrics]
    assert versions[1] == versions[0] + 1
    assert {answer.weights_version[1] for answer in run.answers} == set(versions)


@pytest.mark.req("REP-02", "REP-03", "CHB-01", "RES-31")
def test_channel_b_run_in_vllm_mode_uses_repeat_aware_termination(run: Run) -> None:
    """An answer ends where it repeats itself. The step uses all answers."""
    assert all(line["rollout/repeat_terminate_active"] == 1.0 for line in run.metrics)
    ended = [answer for answer in run.answers if answer.repeat_terminated]
    assert ended
    for answer in run.answers:
        triggers = triggers_at(answer.response_token_ids)
        assert triggers == (len(answer.response_token_ids) if answer.repeat_terminated else None)
    assert all(answer.supervised for answer in run.answers)
    assert [line["packing/post_rollout_segments"] for line in run.metrics] == [SAMPLES] * STEPS
