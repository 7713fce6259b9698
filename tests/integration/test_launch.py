"""`learner launch` as a person starts it, on the CPU: real servers, real learner processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping
from learner.data.toy import ToyData, make_data
from learner.rollout.server_process import free_ports
from tests.contract.running_server import children, wait_until_gone
from tests.unit.small_run import small_mapping

LAUNCH = [sys.executable, "-c", "from learner.cli import main; main()", "launch"]
RUN_S = 400.0
STEPS = 4

pytestmark = [pytest.mark.req("DEP-02"), pytest.mark.timeout(600), pytest.mark.slow]


@dataclass(frozen=True)
class World:
    folder: Path
    model: Path
    data: ToyData

    def config(self, **training: Any) -> Path:
        """Of a run in `folder / "run"`, against one server at a free port."""
        http, group = free_ports(2)
        servers = [{"base_url": f"http://localhost:{http}", "group_port": group}]
        sections: dict[str, Any] = {
            "training": {"max_steps": STEPS, "save_steps": STEPS, "effective_batch_size": 4}
            | training,
            "stage2_ab": {"schedule": {"b_ratio": 0.5}},
            "rollout_matching": {
                "decode_batch_size": 4,
                "vllm": {"mode": "server", "max_model_len": 512, "server": {"servers": servers}},
            },
        }
        file = self.folder / "run.yaml"
        file.write_text(
            dump_mapping(small_mapping(self.model, self.data, self.folder / "run", **sections))
        )
        (self.folder / "servers.yaml").write_text(dump_mapping({"kv_cache_gib": 0.125}))
        return file


@pytest.fixture
def world(tmp_path: Path, tied: Path) -> World:
    return World(tmp_path, tied, make_data(tmp_path / "data", train=16, val=4, seed=0))


class Launch:
    """A running `learner launch`, in a process group of its own."""

    def __init__(self, config: Path, *options: str) -> None:
        folder = config.parent
        self._printed = folder / "printed.txt"
        self.metrics = folder / "run" / "metrics.jsonl"
        own = ["--server-config", str(folder / "servers.yaml"), "--device", "cpu"]
        with self._printed.open("wb") as output:
            self.process = subprocess.Popen(
                [*LAUNCH, "--config", str(config), *own, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"WORLD_SIZE": "5"},  # of whoever starts it: not the learner's
            )

    def printed(self) -> str:
        return self._printed.read_text()

    def steps(self) -> list[int]:
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return [line["step"] for line in map(json.loads, lines) if "loss" in line]

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + RUN_S
        while not condition():
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.05)


@contextmanager
def launched(config: Path, *options: str) -> Iterator[Launch]:
    launch = Launch(config, *options)
    try:
        yield launch
    finally:
        launch.process.kill()
        launch.process.wait()


def test_a_run_from_start_to_end_leaves_its_folder_and_no_process(world: World) -> None:
    with launched(world.config()) as launch:
        launch.wait_for(launch.steps)
        below = children(launch.process.pid)
        names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below]
        for part in (b"rollout_server", b"learner.operate.torchrun", b"EngineCore", b"train"):
            assert any(part in name for name in names), names
        assert launch.process.wait(RUN_S) == 0, launch.printed()
        assert wait_until_gone(below, 0.0) == []
    assert launch.steps() == list(range(1, STEPS + 1))
    run = world.folder / "run"
    assert (run / f"checkpoint-{STEPS}").is_dir()
    assert "route=/infer/ status=200" in (run / "logs" / "server-0.log").read_text()
    assert f"Run folder: {run}" in launch.printed()


def test_a_launch_that_is_killed_in_the_middle_leaves_no_process(world: World) -> None:
    config = world.config(max_steps=500, save_steps=500)
    with launched(config, "--train-processes", "2") as launch:
        launch.wait_for(launch.steps)
        below = children(launch.process.pid)
        launch.process.kill()
        launch.process.wait()
        assert wait_until_gone(below, 60.0) == []
    assert len(launch.steps()) < 500


def test_bad_data_is_told_before_anything_is_started(world: World) -> None:
    config = world.config()
    world.data.train_jsonl.write_text("{not json\n")
    with launched(config) as launch:
        assert launch.process.wait(RUN_S) == 2
    assert f"error: {world.data.train_jsonl}:1\n" in launch.printed()
    assert "Starting" not in launch.printed()
    assert not (world.folder / "run").exists()


def test_an_interrupt_of_the_terminal_stops_servers_that_start(world: World) -> None:
    """It is for the whole foreground group, of which the servers are no part."""
    with launched(world.config()) as launch:
        log = world.folder / "run" / "logs" / "server-0.log"
        launch.wait_for(lambda: log.exists() and log.read_text())
        below = children(launch.process.pid)
        os.killpg(launch.process.pid, signal.SIGINT)
        assert launch.process.wait(RUN_S) == 130, launch.printed()
        assert wait_until_gone(below, 0.0) == []
