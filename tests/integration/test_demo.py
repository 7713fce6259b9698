"""`learner demo` as a person runs it, and as a person interrupts it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contract.running_server import children, is_alive, wait_until_gone

DEMO = [sys.executable, "-c", "from learner.cli import main; main()", "demo"]
CLEAN_UP_S = 60.0


def start_demo(folder: Path) -> tuple["subprocess.Popen[bytes]", Path]:
    """A demo in a process group of its own, and the file it prints to."""
    log = folder / "printed.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*DEMO, "--out", str(folder / "demo")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, log


def wait_for(log: Path, text: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 240
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.req("SRV-05")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("1/5", signal.SIGINT),
        ("2/5", signal.SIGINT),
        ("3/5", signal.SIGINT),
        ("3/5", signal.SIGKILL),
    ],
)
def test_an_interrupted_demo_leaves_no_process(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    process, log = start_demo(tmp_path)
    try:
        wait_for(log, moment, process)
        time.sleep(1.0)
        below = children(process.pid)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # a terminal interrupts the whole group
        else:
            process.send_signal(number)
        process.wait(CLEAN_UP_S)
        assert wait_until_gone(below, CLEAN_UP_S) == []
        assert process.returncode != 0
    finally:
        if is_alive(process.pid):
            process.kill()
            process.wait()


@pytest.mark.req("CHB-01")
@pytest.mark.timeout(1500)
def test_the_demo_raises_the_score_from_nothing_to_a_detector(tmp_path: Path) -> None:
    process, log = start_demo(tmp_path)
    try:
        process.wait(1400)
    finally:
        process.kill()
        process.wait()
    printed = log.read_text()
    assert process.returncode == 0, printed
    before, *_, after = [
        float(f1) for f1 in re.findall(r"│ (?:before|after).*?│ (\d\.\d+)", printed)
    ]
    assert before < 0.05
    assert after >= 0.6
    steps = [
        json.loads(line)
        for line in (tmp_path / "demo" / "two_channel" / "metrics.jsonl").read_text().splitlines()
    ]
    rolled_out = [step for step in steps if step.get("step/channel_b")]
    assert len(rolled_out) == 60
    assert all(step["time/push_s"] > 0 for step in rolled_out)
    for count in ("matched", "fn_appended"):
        assert sum(step[f"stage2_ab/channel_b/{count}"] for step in rolled_out) > 0
