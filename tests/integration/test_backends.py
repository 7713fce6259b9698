"""One config and the same samples through all three backends (ARCH-03).

The learner's weights are not those of the checkpoint that the servers start with: whoever
answers with the checkpoint's has not taken the push.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from learner.backends import open_backend
from learner.config import Config, dump_mapping, load_mapping, merge, parse_config
from learner.model.load import load_model
from learner.operate.server_process import free_ports
from learner.preflight import reach_servers
from learner.train import policy_over
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.contract.running_server import (
    RunningServer,
    children,
    draw_scene,
    wait_until_gone,
)
from tests.contract.toy_checkpoints import set_weights
from tests.integration.colocated_learner import as_line, samples_of

ROOT = Path(__file__).resolve().parents[2]
WARMUP = load_mapping(ROOT / "configs" / "demo" / "warmup.yaml")
LEARNER = [sys.executable, "-m", "tests.integration.colocated_learner"]
GUARD = RepeatTerminateConfig(
    enabled=True, min_new_tokens=2, max_consecutive_token_repeats=3, ngram_size=2, ngram_repeats=2
)
SCENES = 9
CLEAN_UP_S = 30.0

Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def data(server: RunningServer) -> Path:
    """Samples whose images the shared server may read."""
    folder = server.media / "backends"
    folder.mkdir()
    lines = []
    for number in range(SCENES):
        image = draw_scene(folder / f"{number}.png", number)
        box = {"desc": "square", "bbox_2d": [100, 100, 500, 500]}
        lines.append({"images": [image.name], "width": 64, "height": 64, "objects": [box]})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def mapping_of(model: Path, data: Path, out: Path, **rollout: Any) -> dict[str, Any]:
    bare = {key: section for key, section in WARMUP.items() if key != "rollout_matching"}
    return merge(
        bare,
        {
            "model": {"model": str(model)},
            "data": {"train_jsonl": str(data), "val_jsonl": None},
            "training": {"output_dir": str(out)},
            "rollout_matching": {"decode_batch_size": 4, "max_new_tokens": 40, **rollout},
        },
    )


def by_server(server: RunningServer) -> dict[str, Any]:
    (group_port,) = free_ports(1)
    address = {"base_url": server.process.base_url, "group_port": group_port}
    return {"vllm": {"mode": "server", "server": {"servers": [address]}}}


def answers(config: Config, weights: Path, restore: Path | None = None) -> Answers:
    """Greedy answers of all samples with pushed `weights`; then the server gets `restore`."""
    loaded, samples = load_model(config), samples_of(config)
    set_weights(loaded.model, weights)
    folder = Path(config.training.output_dir)
    opened = open_backend(config, loaded, reach_servers(config), folder, samples)
    policy = policy_over(opened, config)
    try:
        policy.push_if_stale()
        outputs = policy.answer(samples, seed=7)
        if restore is not None:
            set_weights(loaded.model, restore)
            policy.mark_updated()
            policy.push_if_stale()
    finally:
        policy.close()
    return read_back(as_line(outputs))


def read_back(line: str) -> Answers:
    said: Answers = json.loads(line)
    return said


class ColocatedLearner:
    """The learner of `colocated_learner.py` as a process."""

    def __init__(self, config: Path, weights: Path) -> None:
        self.process = subprocess.Popen(
            [*LEARNER, str(config), str(weights)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def ask(self) -> Answers:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("answer\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the learner ended; its error is above"
        return read_back(line)

    @property
    def server(self) -> int:
        """Pid of its rollout server."""
        direct = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        (pid,) = (int(pid) for task in direct for pid in task.read_text().split())
        return pid


@contextmanager
def colocated(config: dict[str, Any], weights: Path, folder: Path) -> Iterator[ColocatedLearner]:
    file = folder / "config.yaml"
    file.write_text(dump_mapping(config))
    Path(config["training"]["output_dir"]).mkdir()
    learner = ColocatedLearner(file, weights)
    try:
        yield learner
    finally:
        learner.process.kill()
        learner.process.wait()


def comparable(outputs: Answers) -> Answers:
    """All but the version, which counts on from what the server had before."""
    return [{key: v for key, v in output.items() if key != "weights_version"} for output in outputs]


@pytest.mark.req("ARCH-03", "ROLL-01", "ROLL-03", "SYNC-07", "REP-03", "SEED-02")
@pytest.mark.timeout(600)
def test_all_backends_answer_alike(
    server: RunningServer, tied: Path, other_tied: Path, data: Path, tmp_path: Path
) -> None:
    """`colocate` and `hf` with the guard, `server` and `hf` without; one start of an engine."""
    free = answers(
        parse_config(mapping_of(tied, data, tmp_path / "server", **by_server(server))),
        other_tied,
        restore=tied,
    )
    hf = {"rollout_backend": "hf"}
    free_hf = answers(parse_config(mapping_of(tied, data, tmp_path / "hf", **hf)), other_tied)
    assert comparable(free_hf) == comparable(free)
    assert len({tuple(output["response_token_ids"]) for output in free}) > SCENES // 2
    assert [output["seed"] for output in free] == [7 + i for i in range(SCENES + 1)]
    assert {version for output in free_hf for version in output["weights_version"]} == {1}

    guard = {"repeat_terminate": GUARD.model_dump()}
    guarded_hf = answers(
        parse_config(mapping_of(tied, data, tmp_path / "hf_guarded", **hf, **guard)), other_tied
    )
    assert {output["repeat_terminated"] for output in guarded_hf} == {True, False}
    colocate = mapping_of(tied, data, tmp_path / "run", **guard, vllm={"max_model_len": 512})
    with colocated(colocate, other_tied, tmp_path) as learner:
        first = learner.ask()
        assert first == guarded_hf
        os.kill(learner.server, signal.SIGKILL)
        again = learner.ask()
        assert comparable(again) == comparable(first), "it was started again and pushed to"
        below = children(learner.process.pid)
        assert learner.server in below
        learner.process.kill()
        learner.process.wait()
        assert wait_until_gone(below, CLEAN_UP_S) == []
