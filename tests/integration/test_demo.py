"""`learner demo`: the whole of it, a short one, and one that is interrupted."""

import io
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from rich.console import Console

from learner.operate import demo
from tests.contract.running_server import START_TIMEOUT_S, children, wait_until_gone
from tests.started_command import LEARNER, LIMIT_S, StartedCommand
from tests.unit.small_run import metric_lines


class Demo(StartedCommand):
    def __init__(self, folder: Path, *options: str) -> None:
        words = ["demo", "--out", str(folder / "demo"), *options]
        super().__init__([*LEARNER, *words], folder / "printed.txt")


@pytest.mark.nightly
@pytest.mark.req("CHB-01", "REPORT-01")
def test_demo_raises_the_score_of_held_out_scenes(tmp_path: Path) -> None:
    with Demo(tmp_path, "--control") as running:
        code = running.process.wait()
    printed = running.printed()
    assert code == 0, printed
    scores = dict(re.findall(r"^(\w[\w -]+?) {2,}(\d\.\d+)", printed, re.MULTILINE))
    before, _, both, alone = scores
    assert (before, both, alone) == (
        "before training",
        "after both channels",
        "after channel A alone",
    )
    assert float(scores[before]) < 0.05
    assert min(float(scores[both]), float(scores[alone])) >= 0.6
    steps = metric_lines(tmp_path / "demo" / "two_channel", "loss")
    rolled_out = [step for step in steps if step["step/channel_b"]]
    assert len(rolled_out) == 60
    assert all(step["time/push_s"] > 0 for step in rolled_out)
    for count in ("matched", "fn_appended"):
        assert sum(step[f"stage2_ab/channel_b/{count}"] for step in rolled_out) > 0
    control = metric_lines(tmp_path / "demo" / "channel_a", "loss")
    assert [step["epoch"] for step in control] == [step["epoch"] for step in steps]
    assert not any(step["step/channel_b"] for step in control)
    for run, name in (("two_channel", both), ("channel_a", alone)):
        page = (tmp_path / "demo" / run / "report.html").read_text(encoding="utf-8")
        link = f'<a href="evaluations/checkpoint-120-val/report.html">{scores[name]}</a>'
        assert f"<dt>Held-out F1</dt><dd>{link}</dd>" in page


@pytest.mark.slow
@pytest.mark.req("SRV-05")
def test_interrupted_demo_leaves_no_process(tmp_path: Path) -> None:
    """While its server starts; a terminal interrupts the whole process group."""
    with Demo(tmp_path) as running:
        pid = running.process.pid
        running.wait_for(lambda: "2/5" in running.printed() and children(pid))
        below = children(pid)
        os.killpg(pid, signal.SIGINT)
        assert running.code() != 0
        assert wait_until_gone(below, LIMIT_S) == []


@pytest.mark.slow
@pytest.mark.req("WORLD-01", "CLEAN-01")
def test_crowded_demo_of_a_few_steps_runs_all_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(demo.CONFIGS, configs)
    for shipped in configs.glob("crowded_*.yaml"):
        few = re.sub(
            r"(max_steps|save_steps|effective_batch_size): \d+", r"\1: 4", shipped.read_text()
        )
        shipped.write_text(few.replace("max_new_tokens: 200", "max_new_tokens: 40"))
    monkeypatch.setattr(demo, "CONFIGS", configs)
    monkeypatch.setattr(demo, "TRAIN_SCENES", 16)
    monkeypatch.setattr(demo, "HELD_OUT_SCENES", 2)
    monkeypatch.setattr(demo, "PRETRAINING_STEPS", 4)
    monkeypatch.setattr(demo, "SERVER_START_S", START_TIMEOUT_S)
    console = Console(file=io.StringIO(), width=120)
    folder = tmp_path / "demo"
    demo.run_demo(folder, 0, console, control=True, world="crowded")
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert "8/8 Channel A alone" in printed
    assert "duplicates an answer" in capsys.readouterr().out
    for part in ("distinct", "warmup", "two_channel", "channel_a"):
        assert len(metric_lines(folder / part, "loss")) == 4
    steps = metric_lines(folder / "two_channel", "loss")
    (answered,) = [step for step in steps if step["step/channel_b"]]
    assert "dup/removed" in answered
    assert answered["rollout/repeat_terminate_active"] == 1
    assert '<a href="evaluations/' in (folder / "two_channel" / "report.html").read_text("utf-8")
