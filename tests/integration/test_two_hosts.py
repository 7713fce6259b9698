"""Runs over two hosts: the server on one, learner processes on the other or on both.

Every process has its own address. Weights, rollouts and gradients cross the cable, which is cut.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping
from learner.data.toy import ToyData, make_data
from tests.integration.two_hosts import (
    GROUP_PORT,
    TOKEN,
    FarServer,
    Host,
    NotAllowed,
    ended,
    two_hosts,
)
from tests.unit.small_run import metric_lines, small_mapping

pytestmark = [pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
RENDEZVOUS_PORT = 29_500
STEPS = 4


@dataclass(frozen=True)
class Far:
    """A healthy rollout server on the host `here`. `there` reaches it by a cable."""

    server: FarServer
    here: Host
    there: Host
    checkpoint: Path


@pytest.fixture(scope="module")
def far(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    """Skips where network namespaces are not allowed.

    A test leaves the cable whole and the server READY.
    """
    try:
        with two_hosts() as (here, there):
            server = FarServer(here, tied, tmp_path_factory.mktemp("far"))
            with ended(server.process):
                server.wait_for(200)
                yield Far(server, here, there, tied)
    except NotAllowed as reason:
        pytest.skip(str(reason))


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


@pytest.mark.req("SYNC-07", "SYNC-08", "DDP-02", "SYNC-09", "DIST-05", "CFG-06")
def test_a_run_over_two_hosts_recovers_when_the_cable_is_cut_during_a_rollout(
    far: Far, tmp_path: Path
) -> None:
    """Both processes are on the other host: a cut between them would end the run (DDP-01)."""
    run_nodes(far, (far.there, far.there), tmp_path, cut=True)
    calls = (tmp_path / "run" / "rollout_calls.jsonl").read_text()
    assert "the server is gone" in calls
    check_run(far, tmp_path / "run")


@pytest.mark.req("SYNC-08", "DDP-02", "SYNC-09")
def test_a_run_over_two_hosts_trains_rolls_out_and_pushes(far: Far, tmp_path: Path) -> None:
    run_nodes(far, (far.there, far.here), tmp_path)
    check_run(far, tmp_path / "run")
    calls = [tmp_path / "run" / f"rollout_calls{rank}.jsonl" for rank in ("", ".rank1")]
    logged = [[json.loads(line) for line in file.read_text().splitlines()] for file in calls]
    for rank in logged:
        assert [sum(call["count"] for call in step["calls"]) for step in rank] == [2, 2]
    assert [len(step["pushes"]) for step in logged[0]] == [1, 1]
    assert [len(step["pushes"]) for step in logged[1]] == [0, 0]


def run_nodes(far: Far, hosts: tuple[Host, Host], folder: Path, *, cut: bool = False) -> None:
    """A run with a process on each of `hosts`. cut: the cable, once the server decodes."""
    data = make_data(far.server.media / folder.name, train=24, val=4, seed=0)
    config = config_of(far, data, folder)
    logs = [folder / f"node{node}.log" for node in range(len(hosts))]
    nodes = [
        torchrun(host, node, hosts[0], config, log)
        for node, (host, log) in enumerate(zip(hosts, logs, strict=True))
    ]
    try:
        if cut:
            far.server.wait_until_it_decodes()
            far.here.cut()
            while "is lost" not in "".join(log.read_text() for log in logs):
                assert all(node.poll() is None for node in nodes), logs[0].read_text()
            far.here.mend()
        codes = [node.wait(300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)


def check_run(far: Far, run: Path) -> None:
    steps = metric_lines(run, "loss")
    assert [line["step/channel_b"] for line in steps] == [0, 1, 0, 1]
    first, second = (line["sync/weights_version"] for line in steps if line["step/channel_b"])
    assert second == first + 1
    assert far.server.wait_for(200)["weights_version"] == second
