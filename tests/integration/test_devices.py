"""The processes of a learner find each other on CPUs; tests/gpu has the same on GPUs."""

from pathlib import Path

import pytest

from tests.integration.devices import devices_of_two


@pytest.mark.req("DDP-01")
@pytest.mark.timeout(300)
def test_without_gpus_processes_sum_over_gloo(tmp_path: Path) -> None:
    found = devices_of_two(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert [one["local_rank"] for one in found] == [0, 1]
    assert [one["device"] for one in found] == ["cpu", "cpu"]
    assert all("cpu:gloo" in one["backends"] for one in found)
    assert [one["sum"] for one in found] == [[3.0] * 4] * 2
