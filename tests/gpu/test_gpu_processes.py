"""Several learner processes on GPUs: each takes its own, they sum over NCCL, shards are pushed.

tests/integration/test_colocated_run.py pushes from shards over gloo.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from learner.config import dump_mapping
from learner.data.toy import make_data
from learner.models.toy import make_model
from tests.contract.running_server import running_server
from tests.gpu.servers import ON_0
from tests.integration.shared_server import address_of
from tests.unit.small_run import metric_lines, small_mapping

STEPS = 2
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def torchrun(*program: str, gpus: str) -> None:
    done = subprocess.run(
        [*TORCHRUN, *program],
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
    torchrun("-m", "tests.gpu.device_process", str(tmp_path), gpus="0,1")
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "cuda:nccl" in found.pop("backends")
        device = {"local_rank": rank, "device": f"cuda:{rank}", "pushes_from": rank}
        assert found == device | {"sum": [3.0] * 4}


@pytest.mark.gpu(3)
@pytest.mark.req("SYNC-02", "SYNC-03", "SYNC-06", "SYNC-08", "DDP-02")
def test_a_model_sharded_over_two_gpus_is_pushed_to_a_third(tmp_path: Path) -> None:
    """Before each step, whole weights; the server computes with them."""
    make_model(tmp_path / "model", seed=0)
    with running_server(tmp_path / "model", tmp_path / "server", device=ON_0) as server:
        config = small_mapping(
            tmp_path / "model",
            make_data(server.media / "toy", train=16, val=2, seed=0),
            tmp_path / "run",
            training={"max_steps": STEPS, "save_steps": STEPS, "data_parallel": "fsdp2"},
            stage2_ab={"schedule": {"b_ratio": 1.0}},
            rollout_matching={
                "vllm": {
                    "server": {"servers": [address_of(server.process.base_url)]},
                    "sync": {"transport": "nccl", "verify": "full"},
                }
            },
        )
        (tmp_path / "run.yaml").write_text(dump_mapping(config))
        learner = str(Path(sys.executable).parent / "learner")
        train = ("train", "--config", str(tmp_path / "run.yaml"))
        torchrun("--no-python", learner, *train, gpus="1,2")
    steps = metric_lines(tmp_path / "run", "loss")
    assert [step["sync/pushes"] for step in steps] == [1] * STEPS
    assert all(step["sync/probe_s"] > 0 for step in steps)
    assert steps[-1]["sync/weights_version"] == steps[0]["sync/weights_version"] + STEPS - 1
