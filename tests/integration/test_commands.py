"""The commands doctor, eval, launch and demo, each with a real server."""

import io
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from learner.analysis.evaluation.folder import read_answers
from learner.cli import app
from learner.config import dump_mapping
from learner.data.toy import ToyData, make_data
from learner.operate import demo
from learner.operate.eval_plan import plan_evaluation
from learner.operate.eval_run import run_evaluation
from learner.rollout.server_process import free_ports
from learner.training.server_checks import reach_servers
from tests.contract.running_server import (
    START_TIMEOUT_S,
    RunningServer,
    by_servers,
    children,
    response_ids,
    text_request,
    wait_until_gone,
)
from tests.integration.runs import write_config
from tests.started_command import LEARNER, LIMIT_S, StartedCommand
from tests.unit.small_run import metric_lines, small_config

pytestmark = pytest.mark.slow

STEPS = 4
Found = dict[str, dict[str, Any]]


def diagnose(
    server: RunningServer, data: ToyData, folder: Path, exit_code: int, *options: str
) -> Found:
    """Run `learner doctor` for a run on the shared server; return its findings by check."""
    vllm = by_servers(server.process.base_url)
    config = write_config(
        server.checkpoint,
        data,
        folder,
        stage2_ab={"schedule": {"b_ratio": 0.5}},
        rollout_matching={"decode_batch_size": 4, "max_new_tokens": 24, "vllm": vllm},
    )
    result = CliRunner().invoke(app, ["doctor", "--config", str(config), "--json", *options])
    assert result.exit_code == exit_code, result.output
    document = json.loads(result.stdout)
    assert document["failed"] == (exit_code == 1)
    return {finding["check"]: finding for finding in document["findings"]}


def statuses(found: Found) -> dict[str, set[str]]:
    """Checks by their status."""
    every = {finding["status"] for finding in found.values()}
    return {s: {check for check, f in found.items() if f["status"] == s} for s in every}


@pytest.fixture
def unchanged(server: RunningServer) -> Iterator[None]:
    """The server has the same owner, weights and answers before and after."""

    def state() -> tuple[Any, list[int]]:
        answer, info = response_ids(server.infer([text_request()])[0]), server.info()
        return [info[key] for key in ("owner", "weights_state", "weights_version")], answer

    before = state()
    yield
    assert state() == before


@pytest.fixture(scope="module")
def readable(server: RunningServer) -> ToyData:
    """Data whose images the server may read."""
    return make_data(server.media / "doctor", train=8, val=2, seed=0)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.req("DEP-03")
def test_working_set_up_is_ok_in_every_check(
    server: RunningServer, readable: ToyData, tmp_path: Path
) -> None:
    owner = server.info()["owner"]
    found = diagnose(server, readable, tmp_path, 0)
    doubtful = {"coordinate rows"}  # the checkpoint has random weights
    if owner is not None:  # another test has left the server so
        doubtful |= {"owner"}
    assert statuses(found) == {"ok": set(found) - doubtful, "warn": doubtful}
    assert found["media"]["found"] == "2 image(s) of 2 samples were read"
    assert found["prompt"]["found"] == "2 prompts agree"
    assert "the parser finds" in found["rollout"]["found"]


@pytest.mark.req("DEP-03", "SYNC-06")
def test_push_comes_last_and_the_answers_are_those_of_the_checkpoint(
    server: RunningServer, readable: ToyData, tmp_path: Path
) -> None:
    version = server.version
    found = diagnose(server, readable, tmp_path, 0, "--push")
    assert list(found)[-1] == "push"
    assert "over gloo to 1 worker(s) of " in found["push"]["found"]
    assert found["push"]["found"].endswith(f"; weights {version + 1}")
    info = server.info()
    assert (info["owner"], info["weights_version"]) == (None, version + 1)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.req("DEP-03")
def test_unreadable_images_are_named_with_the_remedy(server: RunningServer, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    data = make_data(outside, train=8, val=2, seed=1)
    found = diagnose(server, data, tmp_path, 1)
    assert statuses(found)["fail"] == {"media"}
    assert statuses(found)["skipped"] == {"prompt", "rollout"}
    assert found["media"]["found"].startswith(f"the server cannot read {outside}/")
    image = Path(found["media"]["found"].split()[4].rstrip(":"))
    assert f"Start the server with --allowed-media-dir {image.parent}, " in found["media"]["do"]


@pytest.mark.req("EVAL-01", "ARCH-03", "SYNC-09", "LOGP-01")
def test_eval_has_answers_of_the_scored_checkpoint_from_a_server_and_from_the_learner(
    server: RunningServer, tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    data = make_data(server.media / "eval", train=1, val=3, seed=0)
    rollout = {"max_new_tokens": 24, "vllm": by_servers(server.process.base_url)}

    def evaluated(checkpoint: Path, name: str, **changes: Any) -> list[list[int]]:
        asked = rollout | {"decode_batch_size": 4} | changes
        config = small_config(tied, data, tmp_path / "run", rollout_matching=asked)
        plan = plan_evaluation(config, checkpoint, None, tmp_path / name)
        run_evaluation(plan, reach_servers(plan.config), Console(file=io.StringIO()))
        return [answer.response_token_ids for answer in read_answers(tmp_path / name)]

    try:
        by_server = evaluated(other_tied, "server", logprobs=True)
    finally:
        server.push(tied)
    assert len(by_server) == 3
    for answer in read_answers(tmp_path / "server"):
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.response_token_ids)
    assert by_server == evaluated(other_tied, "hf", rollout_backend="hf")
    assert by_server != evaluated(tied, "tied", rollout_backend="hf")


@pytest.mark.req("DEP-02")
def test_launch_leaves_its_run_folder_and_no_process(tied: Path, tmp_path: Path) -> None:
    http, group = free_ports(2)
    servers = [{"base_url": f"http://localhost:{http}", "group_port": group}]
    config = write_config(
        tied,
        make_data(tmp_path / "data", train=16, val=4, seed=0),
        tmp_path,
        training={"max_steps": STEPS, "save_steps": STEPS},
        stage2_ab={"schedule": {"b_ratio": 0.5}},
        rollout_matching={"decode_batch_size": 4, "vllm": {"server": {"servers": servers}}},
    )
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
