"""A run split over the GPUs of one node: three serve, one learns (seeds 000, 002)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from learner.config import dump_mapping
from learner.data.toy import make_data
from learner.models.toy import make_model
from learner.rollout.server_process import free_ports
from shared_contracts.machine import query_gpu_use
from tests.contract.running_server import children
from tests.unit.small_run import small_mapping

LAUNCH = [sys.executable, "-c", "from learner.cli import main; main()", "launch"]
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
    mapping = small_mapping(
        tmp_path / "model",
        data,
        tmp_path / "run",
        training={"max_steps": 1, "save_steps": 1, "effective_batch_size": 12},
        stage2_ab={"schedule": {"b_ratio": 1.0}},
        rollout_matching={
            "decode_batch_size": 4,
            "vllm": {"mode": "server", "max_model_len": 640, "server": {"servers": [server]}},
        },
    )
    config = tmp_path / "run.yaml"
    config.write_text(dump_mapping(mapping))
    said = tmp_path / "printed.txt"
    with (
        said.open("wb") as output,
        subprocess.Popen(
            [*LAUNCH, "--config", str(config), *SPLIT],
            stdout=output,
            stderr=output,
            env=os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        ) as launch,
    ):
        learning: set[int] = set()
        serving: set[int] = set()
        deadline = time.monotonic() + RUN_S
        while launch.poll() is None and time.monotonic() < deadline:
            below = children(launch.pid)
            learners = [pid for pid in below if b"learner" in command_of(pid)]
            learning |= gpus_of(learners)
            serving |= gpus_of([pid for pid in below if pid not in learners])
            time.sleep(0.5)
        launch.kill()
    assert launch.returncode == 0, said.read_text()
    assert serving == {0, 1, 2}, "rollouts are generated there"
    assert learning == {3}, "forward and backward run there alone"
    (line,) = [
        line
        for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if "step/channel_b" in line
    ]
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
