"""`learner launch` on the CPU: real servers, real learner processes."""

from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping
from learner.data.toy import make_data
from learner.rollout.server_process import free_ports
from tests.contract.running_server import children, wait_until_gone
from tests.started_command import LEARNER, LIMIT_S, StartedCommand
from tests.unit.small_run import metric_lines, small_mapping

STEPS = 4

pytestmark = [pytest.mark.req("DEP-02"), pytest.mark.slow]


@pytest.fixture
def config(tied: Path, tmp_path: Path) -> Path:
    """A run in `tmp_path / "run"` against one server at a free port."""
    http, group = free_ports(2)
    servers = [{"base_url": f"http://localhost:{http}", "group_port": group}]
    sections: dict[str, Any] = {
        "training": {"max_steps": STEPS, "save_steps": STEPS},
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "rollout_matching": {
            "decode_batch_size": 4,
            "vllm": {"mode": "server", "server": {"servers": servers}},
        },
    }
    data = make_data(tmp_path / "data", train=16, val=4, seed=0)
    config = tmp_path / "run.yaml"
    config.write_text(dump_mapping(small_mapping(tied, data, tmp_path / "run", **sections)))
    return config


def test_launch_leaves_its_run_folder_and_no_process(config: Path, tmp_path: Path) -> None:
    run, own = tmp_path / "run", tmp_path / "servers.yaml"
    metrics = run / "metrics.jsonl"
    own.write_text(dump_mapping({"kv_cache_gib": 0.125}))
    words = ["launch", "--config", str(config), "--server-config", str(own), "--device", "cpu"]
    # WORLD_SIZE must not reach the learner.
    command = StartedCommand([*LEARNER, *words], tmp_path / "printed.txt", WORLD_SIZE="5")
    with command as launch:
        launch.wait_for(lambda: metrics.exists() and metrics.read_text())
        below = children(launch.process.pid)
        names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below]
        for part in (b"rollout_server", b"learner.operate.torchrun", b"EngineCore", b"train"):
            assert any(part in name for name in names), names
        assert launch.code() == 0, launch.printed()
        assert wait_until_gone(below, LIMIT_S) == []
    steps = [line["step"] for line in metric_lines(run, "loss")]
    assert steps == list(range(1, STEPS + 1))
    assert sum("sync/probe_s" in line for line in metric_lines(run, "loss")) == 1
    assert "is lost" not in launch.printed()
    assert (run / f"checkpoint-{STEPS}").is_dir()
    assert "route=/infer/ status=200" in (run / "logs" / "server-0.log").read_text()
    assert f"Run folder: {run}" in launch.printed()
