"""A model in shards (FSDP2) is pushed whole to a real server, over gloo; tests/gpu has NCCL."""

import sys
from pathlib import Path

import pytest

from learner.data.toy import make_data
from shared_contracts.weights import Transport
from tests.contract.running_server import RunningServer, by_servers
from tests.integration.runs import torchrun, write_config
from tests.unit.small_run import metric_lines

LEARNER = Path(sys.executable).parent / "learner"
STEPS = 2


def check_sharded_pushes(
    folder: Path, server: RunningServer, transport: Transport, **environment: str
) -> None:
    """Before each step of channel B whole weights are pushed; the server computes with them.

    environment: of the two learner processes, over this one's.
    """
    data = make_data(server.media / "sharded", train=16, val=2, seed=0)
    training = {"effective_batch_size": 4, "max_steps": STEPS, "save_steps": STEPS}
    sync = {"transport": transport, "verify": "full"}
    config = write_config(
        server.checkpoint,
        data,
        folder,
        training=training | {"data_parallel": "fsdp2"},
        stage2_ab={"schedule": {"b_ratio": 1.0}},
        rollout_matching={"vllm": by_servers(server.process.base_url) | {"sync": sync}},
    )
    torchrun("--no-python", str(LEARNER), "train", "--config", str(config), environment=environment)
    steps = metric_lines(folder / "run", "loss")
    assert [step["sync/pushes"] for step in steps] == [1] * STEPS
    assert all(step["sync/probe_s"] > 0 for step in steps)
    assert steps[-1]["sync/weights_version"] == steps[0]["sync/weights_version"] + STEPS - 1


@pytest.mark.slow
@pytest.mark.req("SYNC-02", "SYNC-06", "SYNC-08", "DDP-02")
def test_a_sharded_model_is_pushed_whole_and_verified(
    server: RunningServer, tied: Path, tmp_path: Path
) -> None:
    try:
        check_sharded_pushes(tmp_path, server, "gloo")
    finally:
        server.push(tied)
