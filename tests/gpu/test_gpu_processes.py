"""Processes on GPUs: each learner takes its own, they sum over NCCL, shards are pushed, a split."""

import json
import time
from pathlib import Path

import httpx
import pytest

from learner.data.toy import make_data
from learner.models.toy import make_model
from learner.rollout.server_process import free_ports
from shared_contracts.machine import query_gpu_use
from tests.contract.running_server import children, running_server
from tests.contract.toy_checkpoints import make_checkpoint
from tests.gpu.servers import ON_0
from tests.integration.runs import torchrun, write_config
from tests.integration.test_sharded_push import check_sharded_pushes
from tests.started_command import LEARNER, StartedCommand
from tests.unit.small_run import metric_lines


@pytest.mark.gpu(2)
@pytest.mark.req("DDP-01")
@pytest.mark.timeout(300)
def test_each_process_takes_the_gpu_of_its_local_rank_and_sums_over_nccl(tmp_path: Path) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "0,1"}
    torchrun("-m", "tests.gpu.device_process", str(tmp_path), environment=visible)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "cuda:nccl" in found.pop("backends")
        device = {"local_rank": rank, "device": f"cuda:{rank}", "pushes_from": rank}
        assert found == device | {"sum": [3.0] * 4}


@pytest.mark.gpu(3)
@pytest.mark.req("SYNC-02", "SYNC-03", "SYNC-06", "SYNC-08", "DDP-02")
def test_a_model_sharded_over_two_gpus_is_pushed_to_a_third(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", seed=0)
    with running_server(model, tmp_path / "server", device=ON_0) as server:
        check_sharded_pushes(tmp_path, server, "nccl", CUDA_VISIBLE_DEVICES="1,2")


SPLIT = ["--server-gpus", "0,1,2", "--train-gpus", "3"]
RUN_S = 900.0


def gpus_of(pids: list[int]) -> set[int]:
    """Ids of the GPUs on which any of the processes holds memory."""
    use = query_gpu_use()
    assert use is not None
    index = {gpu.uuid: gpu.index for gpu in use.gpus}
    return {index[process.gpu_uuid] for process in use.processes if process.pid in pids}


@pytest.mark.gpu(4)
@pytest.mark.timeout(1000)
@pytest.mark.req("DEP-02", "SYNC-03", "SRV-01")
def test_3_rollout_gpus_1_learner_gpu_is_operational(tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=0)
    data = make_data(tmp_path / "data", train=16, val=1, seed=0)
    port, group_port = free_ports(2)
    base_url = f"http://127.0.0.1:{port}"
    server = {"base_url": base_url, "group_port": group_port}
    config = write_config(
        tmp_path / "model",
        data,
        tmp_path,
        training={"max_steps": 1, "save_steps": 1, "effective_batch_size": 12},
        stage2_ab={"schedule": {"b_ratio": 1.0}},
        rollout_matching={
            "decode_batch_size": 4,
            "vllm": {"max_model_len": 640, "server": {"servers": [server]}},
        },
    )
    words = [*LEARNER, "launch", "--config", str(config), *SPLIT]
    learning, serving = set[int](), set[int]()
    with StartedCommand(words, tmp_path / "log", CUDA_DEVICE_ORDER="PCI_BUS_ID") as launch:
        deadline = time.monotonic() + RUN_S
        while launch.process.poll() is None and time.monotonic() < deadline:
            below = children(launch.process.pid)
            learners = [pid for pid in below if b"learner" in command_of(pid)]
            learning |= gpus_of(learners)
            serving |= gpus_of([pid for pid in below if pid not in learners])
            time.sleep(0.5)
    assert launch.process.returncode == 0, launch.printed()
    assert serving == {0, 1, 2}, "rollouts are generated there"
    assert learning == {3}, "forward and backward run there alone"
    (line,) = metric_lines(tmp_path / "run", "step/channel_b")
    assert line["step/channel_b"] == 1.0
    assert line["sync/weights_version"] > 0, "pushed in memory: there is no checkpoint before"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{base_url}/health/", timeout=5.0)


def command_of(pid: int) -> bytes:
    """Empty when the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
