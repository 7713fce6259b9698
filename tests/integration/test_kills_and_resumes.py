"""A run that is killed with SIGKILL and started again is the run that was not killed (RUN-01).

Real processes; the answers come from the learner itself, greedily. `make nightly` also kills
at ten random moments.
"""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from learner.analysis.replay import Rebuilder, StepLog, compare
from learner.analysis.replay.rebuild import load_tokenizer
from learner.config import dump_mapping, load_config
from learner.data.order import BatchOrder
from learner.data.toy import ToyData, make_data
from learner.models.toy import make_model
from learner.runs.rollout_log import unfolded
from learner.runs.run_folder import RunFolder
from learner.training.start_checks import check_inputs
from learner.training.train import train
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("killed_learner.py")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
STEPS, BATCH, SAMPLES, SEED = 8, 4, 16, 11
B_STEPS = [2, 4, 6, 8]
NUMBERS = ("loss", "grad_norm", "learning_rate", "sync/weights_version")


@dataclass(frozen=True)
class World:
    """What runs start from, and a run that nobody has killed."""

    folder: Path
    model: Path
    data: ToyData

    def config(self, run: Path) -> Path:
        """Two epochs; a checkpoint every two steps, of which two are kept."""
        mapping = small_mapping(
            self.model,
            self.data,
            run,
            stage2_ab={"schedule": {"b_ratio": 0.5}},
            training={
                "max_steps": STEPS,
                "save_steps": 2,
                "save_total_limit": 2,
                "effective_batch_size": BATCH,
                "resume": "auto",
            },
        )
        mapping["rollout_matching"] = {
            "rollout_backend": "hf",
            "max_new_tokens": 12,
            "decode_batch_size": 4,
        }
        path = run.with_suffix(".yaml")
        path.write_text(dump_mapping(mapping))
        return path

    @property
    def whole(self) -> Path:
        return self.folder / "whole"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("kills")
    model = folder / "model"
    make_model(model, seed=0)
    data = make_data(folder / "data", train=SAMPLES, val=2, seed=0)
    world = World(folder, model, data)
    config = load_config(world.config(world.whole))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(config, check_inputs(config), [], Console(file=io.StringIO()))
    torch.set_num_threads(threads)
    return world


def command(config: Path, *moment: str) -> list[str]:
    return [sys.executable, str(DRIVER), str(config), *moment]


def learn(config: Path, *moment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(config, *moment),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=ENVIRONMENT,
    )


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoint-*"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(run: Path) -> list[dict[str, Any]]:
    """What is the same however often a run was killed."""
    steps = [line for line in lines(run / "metrics.jsonl") if "loss" in line]
    return [{"step": line["step"], **{key: line.get(key) for key in NUMBERS}} for line in steps]


def weights(checkpoint: Path) -> dict[str, bytes]:
    tensors = load_file(checkpoint / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def assert_the_same_run(run: Path, whole: Path) -> None:
    assert numbers(run) == numbers(whole)
    assert [line["step"] for line in numbers(run)] == list(range(1, STEPS + 1))
    assert weights(run / f"checkpoint-{STEPS}") == weights(whole / f"checkpoint-{STEPS}")
    assert not (run / ".unfinished").exists()
    assert not list(run.rglob("*.part"))


def assert_every_sample_is_logged_once(run: Path, data: ToyData) -> None:
    order = BatchOrder(SAMPLES, BATCH, 1, SEED, shuffle=True)
    name = data.train_jsonl
    wanted = {(step, f"{name}:{i + 1}") for step in B_STEPS for i in order.rank_batch(step - 1, 0)}
    logged = [
        (record["step"], record["sample_id"])
        for path in (run / "rollouts").iterdir()
        for record in lines(path)
    ]
    assert sorted(logged) == sorted(wanted)
    calls = [record["step"] for record in lines(run / "rollout_calls.jsonl")]
    assert calls == B_STEPS


def assert_every_step_is_built_again(run: Path) -> None:
    folder = RunFolder.open(run)
    config, log = folder.config(), StepLog(folder)
    rebuilder = Rebuilder(config, load_tokenizer(Path(config.model.model)))
    for step in B_STEPS:
        replayed = compare(log.step(step), rebuilder)
        assert replayed.first is None
        assert replayed.stages["metrics"].compared > 20


@pytest.mark.req("RUN-01", "STEP-01", "MET-01", "MET-03", "REPLAY-01")
def test_a_run_killed_within_a_step_and_within_a_checkpoint_ends_as_if_it_had_not_been(
    world: World,
) -> None:
    run = world.folder / "killed"
    config = world.config(run)
    answered = "rollouts/step_000004.jsonl.part"
    assert learn(config, "open", answered).returncode == -signal.SIGKILL
    assert checkpoints(run) == ["checkpoint-2"]
    assert len(numbers(run)) == 3  # of which the third will be made again
    half = ".unfinished/checkpoint-6/trainer_state.json"
    resumed = learn(config, "open", half)
    assert resumed.returncode == -signal.SIGKILL, resumed.stderr
    assert f"Going on from {run / 'checkpoint-2'}" in resumed.stdout
    assert checkpoints(run) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    assert (run / ".unfinished" / "checkpoint-6" / "model.safetensors").exists()
    last = learn(config)
    assert last.returncode == 0, last.stderr
    assert f"Going on from {run / 'checkpoint-4'}" in last.stdout
    assert_the_same_run(run, world.whole)
    assert_every_sample_is_logged_once(run, world.data)
    assert_every_step_is_built_again(run)
    assert checkpoints(run) == [
        "checkpoint-6",
        "checkpoint-8",
    ]


@pytest.mark.req("RUN-01")
def test_a_run_that_was_not_killed_logs_every_sample_once_as_well(world: World) -> None:
    assert_every_sample_is_logged_once(world.whole, world.data)


@pytest.mark.req("RUN-01")
def test_a_checkpoint_loads_in_plain_transformers(world: World) -> None:
    checkpoint = world.whole / f"checkpoint-{STEPS}"
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    held = {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}
    assert held == {name: weights(checkpoint)[name] for name in held}
    assert AutoProcessor.from_pretrained(checkpoint).tokenizer.eos_token == "<|im_end|>"


@pytest.mark.req("MET-03")
def test_the_log_of_a_step_has_what_was_asked_and_answered(world: World) -> None:
    (_, first, *_) = sorted((world.whole / "rollouts").iterdir())
    for record in lines(first):
        assert record["rank"] == 0
        assert record["weights_version"] == [2, 2]
        assert len(unfolded(record["prompt_token_ids"])) > len(record["prompt_token_ids"])
        assert 1 <= len(record["response_token_ids"]) <= 12
        assert record["supervised"]
        assert set(record["parse"]) == {"truncated", "invalid", "objects", "dropped"}
        assert len(record["match"]["pairs"]) + len(record["match"]["false_negatives"]) > 0


def killed_after(config: Path, seconds: float) -> bool:
    """Whether a run had to be killed; else it ended well."""
    process = subprocess.Popen(
        command(config), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )
    try:
        assert process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    return False


@pytest.mark.req("RUN-01")
def test_ten_random_kills_change_nothing(world: World, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("hypothesis_profile") != "nightly":
        pytest.skip("takes minutes: make nightly")
    began = time.monotonic()
    assert learn(world.config(world.folder / "timed")).returncode == 0
    whole_s = time.monotonic() - began
    chance = random.Random()
    kills = 0
    for number in range(11):
        run = world.folder / f"random_{number}"
        while kills < 10 and killed_after(world.config(run), chance.uniform(0.4, 1.0) * whole_s):
            kills += 1
        assert learn(world.config(run)).returncode == 0  # the rest, or nothing
        assert_the_same_run(run, world.whole)
        assert_every_sample_is_logged_once(run, world.data)
        if kills == 10:
            return
