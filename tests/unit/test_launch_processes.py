"""Start and stop of servers and learner together: real processes, other programs."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.running_server import children, is_alive, wait_until_gone
from tests.started_command import LIMIT_S, StartedCommand

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "servers": 2,
    "lives": 99,
    "code": 1,
    "ready": True,
    "stubborn": False,
    "learner": [-1, -1],
    "pauses_s": [0.0, 0.0],
}

pytestmark = [pytest.mark.slow, pytest.mark.req("DEP-02")]


class Launch(StartedCommand):
    """A launch of other programs in `folder`; see `launched`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        words = ["-u", "-m", "tests.unit.launched", str(folder), json.dumps(SETTINGS | settings)]
        super().__init__([sys.executable, *words], folder / "printed.txt", PYTHONPATH=str(ROOT))

    def wait_for_files(self, *names: str) -> list[int]:
        """The numbers in these files, once they are all there."""
        files = [self.folder / name for name in names]
        self.wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def all_running(self) -> list[int]:
        """Every process below this one, once the learner's run."""
        self.wait_for_files("serving-0", "serving-1", "learner-0", "learner-1")
        return children(self.process.pid)


def stops(folder: Path) -> list[list[bool]]:
    """For each server that was stopped: which learner processes ran then."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("stopped-*"))]


def test_end_of_the_learner_stops_the_servers_and_gives_the_exit_code(tmp_path: Path) -> None:
    """One process ends with 2; torchrun would end with 1."""
    with Launch(tmp_path, learner=[-1, 2]) as launch:
        below = launch.wait_for_files("serving-0", "serving-1")
        assert launch.code() == 2
        assert "The learner ended with code 2" in launch.printed()
        assert "Traceback" not in launch.printed()
        assert wait_until_gone(below, LIMIT_S) == []
    assert not any(map(any, stops(tmp_path)))
    assert len(stops(tmp_path)) == 2


def test_signal_stops_the_learner_and_then_the_servers(tmp_path: Path) -> None:
    with Launch(tmp_path) as launch:
        below = launch.all_running()
        assert len(below) == 5
        launch.process.send_signal(signal.SIGTERM)
        assert launch.code() == 143
        assert wait_until_gone(below, LIMIT_S) == []
        assert "Stopping the learner (SIGTERM)" in launch.printed()
    assert stops(tmp_path) == [[False, False]] * 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_early_signal_stops_the_servers(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with Launch(tmp_path, ready=False) as launch:
        below = launch.wait_for_files("serving-0", "serving-1")
        launch.process.send_signal(number)
        assert launch.code() == code
        assert wait_until_gone(below, LIMIT_S) == []
    assert len(stops(tmp_path)) == 2


def test_killed_launch_leaves_no_process(tmp_path: Path) -> None:
    """SIGKILL. tests/contract/test_fresh_engine.py kills a real server."""
    with Launch(tmp_path, stubborn=True) as launch:
        below = launch.all_running()
        launch.process.kill()
        assert wait_until_gone(below, LIMIT_S) == []
    assert stops(tmp_path) == []


def test_killed_server_is_restarted_until_the_limit(tmp_path: Path) -> None:
    with Launch(tmp_path, lives=2, pauses_s=[0.0]) as launch:
        below = launch.all_running()
        (before,) = launch.wait_for_files("serving-1")
        os.kill(before, signal.SIGKILL)
        launch.wait_for(lambda: launch.wait_for_files("serving-1") != [before])
        assert all(map(is_alive, launch.wait_for_files("learner-0", "learner-1")))

        below += launch.wait_for_files("serving-1")
        os.kill(below[-1], signal.SIGKILL)
        assert launch.code() == 1
        assert wait_until_gone(below, LIMIT_S) == []
        assert "ended 2 times, the last time with code -9" in launch.printed()
        assert f"{tmp_path / 'server-1.log'}; its last lines:" in launch.printed()
    assert stops(tmp_path) == [[False, False]], "that of server 0"


def test_server_that_does_not_start_ends_the_launch(tmp_path: Path) -> None:
    """The other one is stopped. Exit code 2 of the server is that of the launch."""
    (tmp_path / "starts-1").write_text("x")  # an only life, which is over
    with Launch(tmp_path, lives=1, code=2) as launch:
        assert launch.code() == 2
        printed = launch.printed()
        assert "it ended with code 2" in printed
        assert "no more of this" in printed
        assert not list(tmp_path.glob("learner-*"))
        serving = tmp_path / "serving-0"
        below = [int(serving.read_text())] if serving.exists() else []
        assert wait_until_gone(below, LIMIT_S) == []
