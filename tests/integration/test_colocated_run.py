"""Scenarios of runs that start their rollout server themselves, on a real one (seeds 000, 001).

Two learner processes have one worker of the server each. The untrained model repeats itself, so the
guard ends its answers.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from learner.config import load_config, merge
from learner.data.toy import ToyData, make_data
from learner.models.toy import ToyFamily, make_model
from learner.runs.rollout_log import StepAnswer
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.contract.running_server import children, wait_until_gone
from tests.contract.test_repeat_terminate import trigger
from tests.integration.runs import check_alignment, logged_answers, write_config
from tests.started_command import LIMIT_S, StartedCommand

pytestmark = [pytest.mark.slow]

PROCESSES, STEPS, SAMPLES = 2, 2, 4
LEARNER = str(Path(sys.executable).with_name("learner"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
GUARD = RepeatTerminateConfig(
    enabled=True, min_new_tokens=2, max_consecutive_token_repeats=3, ngram_size=2, ngram_repeats=2
)
OFFLOAD = {"enabled": True, "offload_model": True, "offload_optimizer": True}
ENDLESS = {"max_steps": 10_000, "save_steps": 10_000}


class Run(StartedCommand):
    """A run whose every push is proven by the answers of the server."""

    def __init__(
        self, world: "World", folder: Path, processes: int = PROCESSES, **sections: Any
    ) -> None:
        own = {
            "training": {"effective_batch_size": SAMPLES},
            "stage2_ab": {"schedule": {"b_ratio": 1.0}},
            "rollout_matching": {
                "rollout_backend": "vllm",
                "max_new_tokens": 24,
                "repeat_terminate": GUARD.model_dump(),
                "vllm": {"mode": "colocate", "server": None, "sync": {"verify": "full"}},
            },
        }
        sections = merge(own, sections)
        self.file = write_config(world.model, world.data, folder, **sections)
        self.folder = folder / "run"
        learner = [LEARNER, "train", "--config", str(self.file)]
        several = [*TORCHRUN, str(processes)] if processes > 1 else []
        super().__init__([*several, *learner], folder / "log")

    def logged(self) -> list[dict[str, Any]]:
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [line for line in map(json.loads, lines) if "step/channel_b" in line]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The first steps."""
        return self.logged()[:STEPS]

    @property
    def answers(self) -> list[StepAnswer]:
        """Answers of the first steps."""
        return [answer for answer in logged_answers(self.folder) if answer.step <= STEPS]

    def kill_a_process(self) -> None:
        """After the first steps. The other process and the server end, too."""
        self.wait_for(lambda: len(self.logged()) > STEPS)
        learners = children(self.process.pid)
        started = [each for learner in learners for each in (learner, *children(learner))]
        assert len(started) > PROCESSES  # the server, too
        os.kill(learners[-1], signal.SIGKILL)
        assert self.code() != 0
        assert wait_until_gone(started, LIMIT_S) == []


@dataclass(frozen=True)
class World:
    model: Path
    data: ToyData


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("colocated")
    make_model(folder / "model", seed=0)
    return World(folder / "model", make_data(folder / "data", train=8, val=1, seed=0))


@pytest.fixture(scope="module")
def run(toys: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run under DDP that offloads, and that ended when one process was killed."""
    folder = tmp_path_factory.mktemp("ddp")
    run = Run(toys, folder, training=ENDLESS, rollout_matching={"offload": OFFLOAD})
    run.kill_a_process()
    return run


@pytest.mark.req("ROLL-01", "ROLL-03", "CHB-01")
def test_vllm_backend_produces_token_ids_suitable_for_strict_alignment(run: Run) -> None:
    assert len(run.answers) == STEPS * SAMPLES
    check_alignment(load_config(run.file), run.answers)


@pytest.mark.req("ROLL-03", "SYNC-06")
def test_offload_context_does_not_break_the_training_step(run: Run) -> None:
    """Each step changes weights. Before the next one each process pushes to its own worker."""
    assert "2 replicas" in run.printed()
    assert [step["step"] for step in run.steps] == [1, 2]
    assert all(step["grad_norm"] > 0 for step in run.steps)
    assert all(step["sync/pushes"] == 1 and step["sync/probe_s"] > 0 for step in run.steps)
    versions = [step["sync/weights_version"] for step in run.steps]
    assert versions[1] == versions[0] + 1
    assert {answer.weights_version[1] for answer in run.answers} == set(versions)


@pytest.mark.req("REP-02", "REP-03", "CHB-01", "RES-31")
def test_channel_b_run_in_vllm_mode_uses_repeat_aware_termination(run: Run) -> None:
    """An answer ends where it repeats itself. The step uses all answers."""
    assert all(step["rollout/repeat_terminate_active"] == 1.0 for step in run.steps)
    ended = [answer for answer in run.answers if answer.repeat_terminated]
    assert ended
    for answer in run.answers:
        triggers = trigger(GUARD, [], answer.response_token_ids)  # no rule counts objects
        assert triggers == (len(answer.response_token_ids) if answer.repeat_terminated else None)
    assert all(answer.supervised for answer in run.answers)
    assert [step["packing/post_rollout_segments"] for step in run.steps] == [SAMPLES] * STEPS


# What vLLM's CPU build needs for linear attention.
LINEAR = {
    "model": {"torch_dtype": "bfloat16"},
    "rollout_matching": {"vllm": {"enable_prefix_caching": False}},
}
OTHER_FAMILIES: dict[ToyFamily, dict[str, Any]] = {
    "qwen2_5_vl": {},
    "qwen3_vl_moe": {},
    "qwen3_5": LINEAR,
    "qwen3_5_moe": LINEAR,
}


@pytest.mark.nightly
@pytest.mark.req("FAM-01", "ROLL-03", "SYNC-06")
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_each_family_runs_beside_its_own_server(
    toys: World, tmp_path: Path, family: ToyFamily
) -> None:
    make_model(tmp_path / "model", seed=0, family=family)
    training = {"max_steps": STEPS, "save_steps": STEPS}
    changes = merge(OTHER_FAMILIES[family], {"rollout_matching": {"offload": OFFLOAD}})
    run = Run(World(tmp_path / "model", toys.data), tmp_path, 1, training=training, **changes)
    assert run.code() == 0, run.printed()
    assert len(run.answers) == STEPS * SAMPLES
    check_alignment(load_config(run.file), run.answers)
    assert all(step["sync/pushes"] == 1 and step["sync/probe_s"] > 0 for step in run.steps)
    versions = [step["sync/weights_version"] for step in run.steps]
    assert {answer.weights_version[1] for answer in run.answers} == set(versions)


@pytest.mark.req("ROLL-03", "SYNC-02", "SYNC-06", "SYNC-08", "DDP-02")
def test_a_sharded_run_pushes_whole_weights_to_its_server(toys: World, tmp_path: Path) -> None:
    run = Run(toys, tmp_path, training=ENDLESS | {"data_parallel": "fsdp2"})
    run.kill_a_process()
    first, second = run.steps
    assert all(step["sync/pushes"] == 1 and step["sync/probe_s"] > 0 for step in (first, second))
    assert second["sync/weights_version"] == first["sync/weights_version"] + 1
