"""`learner demo` as a person runs it, and as a person interrupts it."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from learner.operate import demo
from tests.contract.running_server import children, is_alive, wait_until_gone

pytestmark = pytest.mark.slow

DEMO = [sys.executable, "-c", "from learner.cli import main; main()", "demo"]
CLEAN_UP_S = 60.0


def start_demo(folder: Path, *more: str) -> tuple["subprocess.Popen[bytes]", Path]:
    """A demo in a process group of its own, and the file it prints to."""
    log = folder / "printed.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*DEMO, "--out", str(folder / "demo"), *more],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
    return process, log


def wait_for(log: Path, text: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 240
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.req("CHB-01", "REPORT-01")
@pytest.mark.timeout(1500)
def test_the_demo_raises_the_score_from_nothing_to_a_detector(tmp_path: Path) -> None:
    process, log = start_demo(tmp_path, "--control")
    try:
        process.wait(1400)
    finally:
        process.kill()
        process.wait()
    printed = log.read_text()
    assert process.returncode == 0, printed
    scores = dict(re.findall(r"│ (\w[\w -]+?) +│ (\d\.\d+)", printed))
    before, _, both, alone = scores
    assert (before, both, alone) == (
        "before training",
        "after both channels",
        "after channel A alone",
    )
    assert float(scores[before]) < 0.05
    assert min(float(scores[both]), float(scores[alone])) >= 0.6
    steps = steps_of(tmp_path / "demo" / "two_channel")
    rolled_out = [step for step in steps if step["step/channel_b"]]
    assert len(rolled_out) == 60
    assert all(step["time/push_s"] > 0 for step in rolled_out)
    for count in ("matched", "fn_appended"):
        assert sum(step[f"stage2_ab/channel_b/{count}"] for step in rolled_out) > 0
    control = steps_of(tmp_path / "demo" / "channel_a")
    assert [step["epoch"] for step in control] == [step["epoch"] for step in steps]
    assert not any(step["step/channel_b"] for step in control)
    for run, name in (("two_channel", both), ("channel_a", alone)):
        page = (tmp_path / "demo" / run / "report.html").read_text(encoding="utf-8")
        link = f'<a href="evaluations/checkpoint-120-val/report.html">{scores[name]}</a>'
        assert f"<dt>Held-out F1</dt><dd>{link}</dd>" in page


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
        try:
            process.wait(CLEAN_UP_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler writes where each thread is
            process.wait()
            pytest.fail(log.read_text())
        assert wait_until_gone(below, CLEAN_UP_S) == []
        assert process.returncode != 0
    finally:
        if is_alive(process.pid):
            process.kill()
            process.wait()


@pytest.mark.req("WORLD-01", "CLEAN-01")
@pytest.mark.timeout(600)
def test_the_crowded_demo_learns_few_shapes_first_and_ends_with_a_clean_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its parts, with few scenes and steps."""
    configs = tmp_path / "configs"
    shutil.copytree(demo.CONFIGS, configs)
    for shipped in configs.glob("crowded_*.yaml"):
        few = re.sub(r"(max_steps|save_steps): \d+", r"\1: 4", shipped.read_text())
        shipped.write_text(few)
    monkeypatch.setattr(demo, "CONFIGS", configs)
    monkeypatch.setattr(demo, "TRAIN_SCENES", 32)
    monkeypatch.setattr(demo, "HELD_OUT_SCENES", 4)
    console = Console(file=io.StringIO(), width=120)
    folder = tmp_path / "demo"
    demo.run_demo(folder, 0, console, control=True, world="crowded")
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert "7/7 Channel A alone" in printed
    assert "duplicates an answer" in printed
    for part in ("sparse", "warmup", "two_channel", "channel_a"):
        assert len(steps_of(folder / part)) == 4
    (answered,) = [step for step in steps_of(folder / "two_channel") if step["step/channel_b"]]
    assert "dup/removed" in answered
    assert answered["rollout/repeat_terminate_active"] == 1
