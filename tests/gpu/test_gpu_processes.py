"""Several learner processes on GPUs: each takes its own, they sum over NCCL, shards are pushed."""

from pathlib import Path

import pytest

from tests.gpu.servers import ON_0
from tests.integration.devices import devices_of_two
from tests.integration.sharded_push import check_pushes, pushed_from_shards


@pytest.mark.gpu(2)
@pytest.mark.req("DDP-01")
@pytest.mark.timeout(300)
def test_each_process_takes_the_gpu_of_its_local_rank_and_sums_over_nccl(tmp_path: Path) -> None:
    found = devices_of_two(tmp_path, CUDA_VISIBLE_DEVICES="0,1")
    assert [one["local_rank"] for one in found] == [0, 1]
    assert [one["device"] for one in found] == ["cuda:0", "cuda:1"]
    assert [one["pushes_from"] for one in found] == [0, 1]
    assert all("cuda:nccl" in one["backends"] for one in found)
    assert [one["sum"] for one in found] == [[3.0] * 4] * 2


@pytest.mark.gpu(3)
@pytest.mark.req("SYNC-02", "SYNC-03", "SYNC-06", "SYNC-08", "DDP-02")
@pytest.mark.timeout(900)
def test_a_model_sharded_over_two_gpus_is_pushed_to_a_third(tmp_path: Path) -> None:
    check_pushes(pushed_from_shards(tmp_path, ON_0, "nccl", CUDA_VISIBLE_DEVICES="1,2"))
