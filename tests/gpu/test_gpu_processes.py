"""Several learner processes on GPUs: each takes its own, they sum over NCCL, shards are pushed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from learner.config import dump_mapping
from learner.data.toy import make_data
from learner.models.toy import make_model
from learner.rollout.server_process import free_ports
from tests.contract.running_server import running_server
from tests.gpu.servers import ON_0
from tests.unit.small_run import small_mapping

LEARNER = Path(sys.executable).parent / "learner"
STEPS = 2


def torchrun(gpus: str, *program: str) -> None:
    """Two processes of `program`, which see these GPUs."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", *program),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.gpu(2)
@pytest.mark.req("DDP-01")
@pytest.mark.timeout(300)
def test_each_process_takes_the_gpu_of_its_local_rank_and_sums_over_nccl(tmp_path: Path) -> None:
    torchrun("0,1", "-m", "tests.gpu.device_process", str(tmp_path))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "cuda:nccl" in found.pop("backends")
        device = {"local_rank": rank, "device": f"cuda:{rank}", "pushes_from": rank}
        assert found == device | {"sum": [3.0] * 4}


@pytest.mark.gpu(3)
@pytest.mark.req("SYNC-02", "SYNC-03", "SYNC-06", "SYNC-08", "DDP-02")
@pytest.mark.timeout(900)
def test_a_model_sharded_over_two_gpus_is_pushed_to_a_third(tmp_path: Path) -> None:
    """Whole, before each step. `verify: full` raises if the server computes with other weights."""
    make_model(tmp_path / "model", seed=0)
    with running_server(tmp_path / "model", tmp_path / "server", device=ON_0) as server:
        data = make_data(server.media / "toy", train=16, val=2, seed=0)
        (group_port,) = free_ports(1)
        address = {"base_url": server.process.base_url, "group_port": group_port}
        sync = {"transport": "nccl", "verify": "full"}
        config = small_mapping(
            tmp_path / "model",
            data,
            tmp_path / "run",
            training={
                "effective_batch_size": 4,
                "max_steps": STEPS,
                "save_steps": STEPS,
                "data_parallel": "fsdp2",
            },
            stage2_ab={"schedule": {"b_ratio": 1.0}},
            rollout_matching={"vllm": {"server": {"servers": [address]}, "sync": sync}},
        )
        (tmp_path / "run.yaml").write_text(dump_mapping(config))
        torchrun(
            "1,2", "--no-python", str(LEARNER), "train", "--config", str(tmp_path / "run.yaml")
        )
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    first, second = (line for line in lines if "loss" in line)
    assert all(step["sync/pushes"] == 1 and step["sync/probe_s"] > 0 for step in (first, second))
    assert second["sync/weights_version"] == first["sync/weights_version"] + 1
