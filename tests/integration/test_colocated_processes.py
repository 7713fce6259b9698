"""A colocated server of two learner processes: one worker for each, pushed to by both (ROLL-03)."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping
from learner.data.toy import ToyData, make_data
from learner.models.toy import make_model
from tests.contract.running_server import children, wait_until_gone
from tests.unit.small_run import small_mapping

pytestmark = [pytest.mark.slow, pytest.mark.req("ROLL-03", "SYNC-06")]

PROCESSES, STEPS, SAMPLES = 2, 2, 4
LEARNER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LEARNER += ["--nproc-per-node", str(PROCESSES), str(Path(sys.executable).with_name("learner"))]
LIMIT_S = 400.0  # only a run that hangs takes so long


@dataclass(frozen=True)
class World:
    model: Path
    data: ToyData

    def start(self, folder: Path, parallel: str, steps: int = STEPS) -> subprocess.Popen[bytes]:
        """Start a run whose every push is proven by the answers of the server; it has a `log`."""
        mapping = small_mapping(
            self.model,
            self.data,
            folder / "run",
            training={
                "max_steps": steps,
                "save_steps": steps,
                "effective_batch_size": SAMPLES,
                "data_parallel": parallel,
            },
            stage2_ab={"schedule": {"b_ratio": 1.0}},
            rollout_matching={"rollout_backend": "vllm", "max_new_tokens": 24},
        )
        vllm = {"mode": "colocate", "max_model_len": 640, "sync": {"verify": "full"}}
        mapping["rollout_matching"]["vllm"] = vllm
        file = folder / "run.yaml"
        file.write_text(dump_mapping(mapping))
        command = [*LEARNER, "train", "--config", str(file)]
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("colocated")
    make_model(folder / "model", seed=0)
    return World(folder / "model", make_data(folder / "data", train=8, val=1, seed=0))


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "step/channel_b" in line]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_each_process_pushes_to_its_own_worker_and_both_answer(
    world: World, tmp_path: Path, parallel: str
) -> None:
    process = world.start(tmp_path, parallel)
    ended = process.wait(LIMIT_S)
    output = (tmp_path / "log").read_text()
    assert ended == 0, output
    assert "2 replicas" in output
    steps = steps_of(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["sync/pushes"] == 1 and step["sync/probe_s"] > 0 for step in steps)
    assert steps[1]["sync/weights_version"] == steps[0]["sync/weights_version"] + 1
    assert [step["packing/post_rollout_segments"] for step in steps] == [SAMPLES] * STEPS


def test_the_end_of_one_process_ends_the_other_and_the_server(world: World, tmp_path: Path) -> None:
    process = world.start(tmp_path, "ddp", steps=10_000)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and steps_of(tmp_path / "run")):
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    learners = children(process.pid)
    started = [each for learner in learners for each in (learner, *children(learner))]
    assert len(started) > PROCESSES  # the server, too
    os.kill(learners[-1], signal.SIGKILL)
    assert process.wait(LIMIT_S) != 0
    assert wait_until_gone(started, LIMIT_S) == []
