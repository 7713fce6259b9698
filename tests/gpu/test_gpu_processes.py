"""Several learner processes on GPUs: each takes its own, they sum over NCCL, shards are pushed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.running_server import running_server
from tests.contract.toy_checkpoints import make_checkpoint
from tests.gpu.servers import ON_0
from tests.integration.sharded_push import check_pushes, pushed_from_shards


@pytest.mark.gpu(2)
@pytest.mark.req("DDP-01")
@pytest.mark.timeout(300)
def test_each_process_takes_the_gpu_of_its_local_rank_and_sums_over_nccl(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "tests.gpu.device_process", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
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
        check_pushes(pushed_from_shards(tmp_path, server, "nccl", CUDA_VISIBLE_DEVICES="1,2"))
