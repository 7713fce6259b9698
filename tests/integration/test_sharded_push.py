"""A model in shards is pushed whole to a real server, over gloo; tests/gpu does so over NCCL."""

from pathlib import Path

import pytest

from tests.contract.running_server import RunningServer
from tests.integration.sharded_push import check_pushes, pushed_from_shards
from tests.integration.shared_server import give_back

pytestmark = pytest.mark.slow


@pytest.mark.req("SYNC-02", "SYNC-06", "SYNC-08", "DDP-02")
def test_a_sharded_model_is_pushed_whole_and_verified(
    server: RunningServer, tied: Path, tmp_path: Path
) -> None:
    try:
        check_pushes(pushed_from_shards(tmp_path, server, "gloo"))
    finally:
        give_back(server, tied)
