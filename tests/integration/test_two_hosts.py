"""A run over several hosts: the server on one, the learner's processes on both (SYNC-08).

Every process has its own address; weights and rollouts cross the cable, and so do gradients.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping
from learner.data.toy import ToyData, make_data
from tests.integration.conftest import Far
from tests.integration.far_server import GROUP_PORT, TOKEN
from tests.integration.two_hosts import Host
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.slow

RENDEZVOUS_PORT = 29_500
STEPS = 4


def torchrun(
    host: Host, node: int, master: Host, config: Path, log: Path
) -> "subprocess.Popen[bytes]":
    """One learner process on `host`, as docs/operations.md has a node start it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
    meet = [f"--master-addr={master.address}", f"--master-port={RENDEZVOUS_PORT}"]
    learner = ["--nproc-per-node=1", "--no-python", str(Path(sys.executable).parent / "learner")]
    own = {"ROLLOUT_SERVER_TOKEN": TOKEN, "GLOO_SOCKET_IFNAME": host.end, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [*host.enter, *launch, *meet, *learner, "train", "--config", str(config)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | own,
        )


def config_of(far: Far, data: ToyData, folder: Path) -> Path:
    address = {"base_url": far.server.url, "group_port": GROUP_PORT}
    sections: dict[str, Any] = {
        "training": {"max_steps": STEPS, "save_steps": STEPS},
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "rollout_matching": {
            "repeat_terminate": {"enabled": False},
            "vllm": {"mode": "server", "server": {"servers": [address]}},
        },
    }
    file = folder / "run.yaml"
    file.write_text(dump_mapping(small_mapping(far.checkpoint, data, folder / "run", **sections)))
    return file


@pytest.mark.req("SYNC-08", "DDP-02", "SYNC-09")
@pytest.mark.timeout(400)
def test_a_run_over_two_hosts_trains_rolls_out_and_pushes(far: Far, tmp_path: Path) -> None:
    data = make_data(far.server.media / "toy", train=24, val=4, seed=0)
    config = config_of(far, data, tmp_path)
    hosts = (far.there, far.here)
    logs = [tmp_path / f"node{node}.log" for node in range(len(hosts))]
    nodes = [
        torchrun(host, node, hosts[0], config, log)
        for node, (host, log) in enumerate(zip(hosts, logs, strict=True))
    ]
    try:
        codes = [node.wait(300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step/channel_b"] for line in steps] == [0, 1, 0, 1]
    first, second = (line["sync/weights_version"] for line in steps if line["step/channel_b"])
    assert second == first + 1
    assert steps[1]["sync/pushes"] == 1
    assert far.server.wait_for(200)["weights_version"] == second
    calls = [run / "rollout_calls.jsonl", run / "rollout_calls.rank1.jsonl"]
    asked = [[json.loads(line) for line in file.read_text().splitlines()] for file in calls]
    for rank in asked:
        assert [sum(call["count"] for call in step["calls"]) for step in rank] == [2, 2]
    assert [len(step["pushes"]) for step in asked[0]] == [1, 1]
    assert [len(step["pushes"]) for step in asked[1]] == [0, 0]
