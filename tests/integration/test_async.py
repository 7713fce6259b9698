"""An asynchronous run of two processes with a real server, killed in the middle and started again.

Real processes over gloo, real pushes while answers are asked for beside them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping
from learner.data.jsonl import read_samples
from learner.data.toy import make_data
from learner.rollout.server_process import free_ports
from learner.runs.checkpoint import newest_whole
from tests.contract.running_server import RunningServer
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import push, weight_group
from tests.integration.ranks import RUN_S, nursery, wait_until
from tests.unit.small_run import small_mapping

RANKS, BATCH, STEPS, SAVED_EVERY = 2, 8, 12, 4
WINDOW = 2
ASYNC = "stage2_ab/async"

Line = dict[str, Any]

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@dataclass(frozen=True)
class Run:
    """What a run has left. steps: its lines of metrics. answers: lines of its logged rollouts.

    states: of its processes in the last checkpoint. samples: ids of all its samples.
    """

    steps: list[Line]
    answers: list[Line]
    states: list[dict[str, Any]]
    samples: set[str]


def lines_of(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module")
def run(server: RunningServer, tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The shared server has the weights it began with when all is over."""
    folder = tmp_path_factory.mktemp("async")
    data = make_data(server.media / "async", train=BATCH * STEPS, val=4, seed=0)
    (group_port,) = free_ports(1)
    address = {"base_url": server.process.base_url, "group_port": group_port}
    sections: dict[str, Any] = {
        "training": {
            "max_steps": STEPS,
            "save_steps": SAVED_EVERY,
            "effective_batch_size": BATCH,
            "resume": "auto",
        },
        "stage2_ab": {"schedule": {"b_ratio": 0.75}},
        "rollout_matching": {
            "decode_batch_size": 4,
            "max_new_tokens": 32,
            "vllm": {
                "mode": "server",
                "server": {"servers": [address], "timeout_s": 120},
                "sync": {"mode": "full"},
            },
            "async_rollout": {"enabled": True, "version_window": WINDOW},
        },
    }
    out, config = folder / "run", folder / "run.yaml"
    config.write_text(dump_mapping(small_mapping(tied, data, out, **sections)))
    try:
        with nursery(folder) as ranks:
            first = ranks.start(config, RANKS, folder / "first")
            wait_until(lambda: len(lines_of(out / "metrics.jsonl")) > SAVED_EVERY, first)
            first.kill(0, 1)
            first.wait()
            again = ranks.start(config, RANKS, folder / "again")
            assert again.wait(RUN_S) == [0, 0], again.said()
    finally:
        version = server.http.get("/info/").json()["weights_version"] + 1
        (port,) = free_ports(1)
        with weight_group(server.http, port, timeout_s=30.0) as sender:
            push(server.http, sender, read_weights(tied), version)
    checkpoint, _ = newest_whole(out)
    assert checkpoint is not None
    return Run(
        [line for line in lines_of(out / "metrics.jsonl") if "loss" in line],
        [line for file in (out / "rollouts").glob("*.jsonl") for line in lines_of(file)],
        checkpoint.manifest.states,
        {sample.sample_id for sample in read_samples(data.train_jsonl, allow_poly=False)},
    )


@pytest.mark.req("ASYNC-01", "STEP-01", "RES-07")
def test_channel_b_trains_on_answers_that_were_made_beside_training(run: Run) -> None:
    trained = [line for line in run.steps if line["step/channel_b"]]
    assert trained
    assert max(line[f"{ASYNC}/ready_packs"] for line in run.steps) > 0
    for line in trained:
        assert line[f"{ASYNC}/version_lag"] <= WINDOW
        assert line["packing/post_rollout_segments"] == BATCH


@pytest.mark.req("STEP-02", "ASYNC-01", "RUN-01")
def test_every_share_is_trained_on_once_though_the_run_was_killed(run: Run) -> None:
    assert [line["step"] for line in run.steps] == list(range(1, STEPS + 1))
    assert run.states == [{"next": STEPS, "left": []}] * RANKS
    answered = [line["sample_id"] for line in run.answers]
    assert len(set(answered)) == len(answered)
    assert set(answered) <= run.samples
    trained = sum(line["step/channel_b"] for line in run.steps)
    assert len(answered) == trained * BATCH


@pytest.mark.req("ASYNC-01", "SYNC-09")
def test_weights_are_pushed_before_every_step_and_answers_are_by_one_of_them(run: Run) -> None:
    assert all(line["time/push_s"] > 0 and line["sync/pushes"] == 1 for line in run.steps)
    for line in run.answers:
        assert len(set(line["weights_version"])) == 1
