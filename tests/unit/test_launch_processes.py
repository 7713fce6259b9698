"""Servers and learner that are stopped together, with stand-ins for both; real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.running_server import children, is_alive, wait_until_gone

ROOT = Path(__file__).parents[2]
LONG_S = 60.0
TOLD: dict[str, Any] = {
    "servers": 2,
    "lives": 99,
    "code": 1,
    "ready": True,
    "stubborn": False,
    "unstoppable": False,
    "learner": [-1, -1],
    "pauses_s": [0.0, 0.0],
}

pytestmark = [pytest.mark.slow, pytest.mark.req("DEP-02"), pytest.mark.timeout(300)]


class Launch:
    """A launch of stand-ins in `folder`; see `launched`."""

    def __init__(self, folder: Path, told: dict[str, Any]) -> None:
        self.folder = folder
        self._printed = folder / "printed.txt"
        with self._printed.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.unit.launched", folder, json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    def printed(self) -> str:
        return self._printed.read_text()

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.02)

    def wait_for_files(self, *names: str) -> list[int]:
        """The numbers in these files, once they are all there."""
        files = [self.folder / name for name in names]
        self.wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def all_running(self) -> list[int]:
        """Every process below this one, once the learner's run."""
        self.wait_for_files("serving-0", "serving-1", "learner-0", "learner-1")
        return children(self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def code(self) -> int:
        return self.process.wait(LONG_S)


@contextmanager
def launched(folder: Path, **told: Any) -> Iterator[Launch]:
    launch = Launch(folder, TOLD | told)
    try:
        yield launch
    finally:
        launch.process.kill()
        launch.process.wait()


def stops(folder: Path) -> list[list[bool]]:
    """For each server that was stopped: which learner processes ran then."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("stopped-*"))]


def test_the_learners_end_stops_the_servers_and_is_that_of_the_launch(tmp_path: Path) -> None:
    """Of the 2 that one process ends with, torchrun would make 1."""
    with launched(tmp_path, learner=[-1, 2]) as launch:
        below = launch.wait_for_files("serving-0", "serving-1")
        assert launch.code() == 2
        assert "The learner ended with code 2" in launch.printed()
        assert "Traceback" not in launch.printed()
        assert wait_until_gone(below, 0.0) == []
    assert not any(map(any, stops(tmp_path)))
    assert len(stops(tmp_path)) == 2


def test_a_stop_that_fails_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, learner=[0, 0], unstoppable=True) as launch:
        below = launch.wait_for_files("serving-0", "serving-1")
        assert launch.code() == 0
        assert "could not be stopped (PermissionError('not this one'))" in launch.printed()
        assert wait_until_gone(below, LONG_S) == []
    assert len(stops(tmp_path)) == 1


def test_a_signal_stops_the_learner_and_then_the_servers(tmp_path: Path) -> None:
    with launched(tmp_path) as launch:
        below = launch.all_running()
        assert len(below) == 5
        launch.signal(signal.SIGTERM)
        assert launch.code() == 143
        assert wait_until_gone(below, 0.0) == []
        assert "Stopping the learner (SIGTERM)" in launch.printed()
    assert stops(tmp_path) == [[False, False]] * 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_while_servers_start_stops_them(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with launched(tmp_path, ready=False) as launch:
        below = launch.wait_for_files("serving-0", "serving-1")
        launch.signal(number)
        assert launch.code() == code
        assert wait_until_gone(below, 0.0) == []
    assert len(stops(tmp_path)) == 2


def test_a_second_signal_waits_for_nobody(tmp_path: Path) -> None:
    with launched(tmp_path, ready=False, stubborn=True) as launch:
        below = launch.wait_for_files("serving-0", "serving-1")
        launch.signal(signal.SIGTERM)
        launch.wait_for(lambda: len(stops(tmp_path)) == 2)
        assert all(map(is_alive, below))
        launch.signal(signal.SIGTERM)
        assert launch.process.wait(10) == 143
        assert wait_until_gone(below, 0.0) == []


def test_torchrun_that_is_killed_takes_the_learner_with_it(tmp_path: Path) -> None:
    with launched(tmp_path) as launch:
        below = launch.all_running()
        (torchrun,) = [pid for pid in below if len(children(pid)) == 2]
        os.kill(torchrun, signal.SIGKILL)
        assert launch.code() == 1
        assert wait_until_gone(below, LONG_S) == []


def test_a_server_that_is_killed_is_started_again_until_it_is_enough(tmp_path: Path) -> None:
    with launched(tmp_path, lives=2, pauses_s=[0.0]) as launch:
        below = launch.all_running()
        (before,) = launch.wait_for_files("serving-1")
        os.kill(before, signal.SIGKILL)
        launch.wait_for(lambda: launch.wait_for_files("serving-1") != [before])
        assert all(map(is_alive, launch.wait_for_files("learner-0", "learner-1")))

        below += launch.wait_for_files("serving-1")
        os.kill(below[-1], signal.SIGKILL)
        assert launch.code() == 1
        assert wait_until_gone(below, 0.0) == []
        assert "ended 2 times, the last time with code -9" in launch.printed()
        assert f"{tmp_path / 'server-1.log'}; its last lines:" in launch.printed()
    assert stops(tmp_path) == [[False, False]], "that of server 0"


def test_a_server_that_does_not_start_ends_the_launch_before_the_learner(tmp_path: Path) -> None:
    """The other one is stopped; it had been told something wrong, which is bad input."""
    (tmp_path / "starts-1").write_text("x")  # an only life, which is over
    with launched(tmp_path, lives=1, code=2) as launch:
        assert launch.code() == 2
        printed = launch.printed()
        assert "it ended with code 2" in printed
        assert "no more of this" in printed
        assert not list(tmp_path.glob("learner-*"))
        serving = tmp_path / "serving-0"
        below = [int(serving.read_text())] if serving.exists() else []
        assert wait_until_gone(below, 0.0) == []
