"""`learner launch` on the CPU: real servers, real learner processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping
from learner.data.toy import make_data
from learner.rollout.server_process import free_ports
from tests.contract.running_server import children, wait_until_gone
from tests.started_command import LEARNER, LIMIT_S, StartedCommand
from tests.unit.small_run import small_mapping

STEPS = 4

pytestmark = [pytest.mark.req("DEP-02"), pytest.mark.timeout(600), pytest.mark.slow]


class Launch(StartedCommand):
    """`learner launch` of a run in `folder / "run"`, against one server at a free port."""

    def __init__(self, folder: Path, model: Path, *options: str, **training: Any) -> None:
        http, group = free_ports(2)
        servers = [{"base_url": f"http://localhost:{http}", "group_port": group}]
        sections: dict[str, Any] = {
            "training": {"max_steps": STEPS, "save_steps": STEPS, **training},
            "stage2_ab": {"schedule": {"b_ratio": 0.5}},
            "rollout_matching": {
                "decode_batch_size": 4,
                "vllm": {"mode": "server", "max_model_len": 512, "server": {"servers": servers}},
            },
        }
        data = make_data(folder / "data", train=16, val=4, seed=0)
        self.run = folder / "run"
        config, own = folder / "run.yaml", folder / "servers.yaml"
        config.write_text(dump_mapping(small_mapping(model, data, self.run, **sections)))
        own.write_text(dump_mapping({"kv_cache_gib": 0.125}))
        files = ["--config", str(config), "--server-config", str(own)]
        words = ["launch", *files, "--device", "cpu", *options]
        # WORLD_SIZE must not reach the learner.
        super().__init__([*LEARNER, *words], folder / "printed.txt", WORLD_SIZE="5")

    def steps(self) -> list[int]:
        metrics = self.run / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [line["step"] for line in map(json.loads, lines) if "loss" in line]


def test_launch_leaves_its_run_folder_and_no_process(tmp_path: Path, tied: Path) -> None:
    with Launch(tmp_path, tied) as launch:
        launch.wait_for(launch.steps)
        below = children(launch.process.pid)
        names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below]
        for part in (b"rollout_server", b"learner.operate.torchrun", b"EngineCore", b"train"):
            assert any(part in name for name in names), names
        assert launch.code() == 0, launch.printed()
        assert wait_until_gone(below, LIMIT_S) == []
    assert launch.steps() == list(range(1, STEPS + 1))
    assert (launch.run / f"checkpoint-{STEPS}").is_dir()
    assert "route=/infer/ status=200" in (launch.run / "logs" / "server-0.log").read_text()
    assert f"Run folder: {launch.run}" in launch.printed()


def test_killed_launch_leaves_no_process(tmp_path: Path, tied: Path) -> None:
    steps = {"max_steps": 500, "save_steps": 500}
    with Launch(tmp_path, tied, "--train-processes", "2", **steps) as launch:
        launch.wait_for(launch.steps)
        below = children(launch.process.pid)
        launch.process.kill()
        launch.process.wait()
        assert wait_until_gone(below, LIMIT_S) == []
    assert len(launch.steps()) < 500
