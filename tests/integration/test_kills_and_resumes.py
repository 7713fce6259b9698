"""A run that is killed with SIGKILL and started again equals the run that was not (RUN-01).

Real processes. The answers come from the learner itself, greedily.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from learner.analysis.replay import first_difference, load_tokenizer, rebuild
from learner.config import dump_mapping, load_config
from learner.data.order import BatchOrder
from learner.data.toy import ToyData, make_data
from learner.models.toy import make_model
from learner.runs.run_folder import RunFolder
from tests.integration.ranks import RUN_S, Nursery
from tests.unit.small_run import run_quietly, small_mapping

pytestmark = pytest.mark.slow

STEPS, BATCH, SAMPLES, SEED = 8, 4, 16, 11
B_STEPS = [2, 4, 6, 8]
NUMBERS = ("loss", "grad_norm", "learning_rate", "sync/weights_version")


@dataclass(frozen=True)
class World:
    """The start of runs, and a run that was not killed: `whole`."""

    folder: Path
    model: Path
    data: ToyData
    nursery: Nursery

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
            rollout_matching={
                "rollout_backend": "hf",
                "max_new_tokens": 12,
                "decode_batch_size": 4,
            },
        )
        path = run.with_suffix(".yaml")
        path.write_text(dump_mapping(mapping))
        return path

    @property
    def whole(self) -> Path:
        return self.folder / "whole"


@pytest.fixture(scope="module")
def world(started: Nursery, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("kills")
    model = folder / "model"
    make_model(model, seed=0)
    data = make_data(folder / "data", train=SAMPLES, val=2, seed=0)
    world = World(folder, model, data, started)
    config = load_config(world.config(world.whole))
    run_quietly(config)
    return world


def learn(world: World, config: Path, *moment: str | float) -> tuple[int, str]:
    ranks = world.nursery.start(config, 1, moment)
    (code,) = ranks.wait(RUN_S)
    return code, ranks.log(0)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoint-*"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(run: Path) -> list[dict[str, Any]]:
    """The part of a run that does not depend on kills."""
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
    config = folder.config()
    tokenizer = load_tokenizer(Path(config.model.model))
    for step in B_STEPS:
        answers = folder.answers(step)
        for logged, rebuilt in zip(answers, rebuild(answers, config, tokenizer), strict=True):
            assert first_difference(logged, rebuilt) is None


@pytest.mark.req("RUN-01", "STEP-01", "MET-01", "MET-03", "REPLAY-01")
def test_a_run_killed_in_a_step_and_in_a_checkpoint_equals_the_run_that_was_not_killed(
    world: World,
) -> None:
    assert_every_sample_is_logged_once(world.whole, world.data)
    run = world.folder / "killed"
    config = world.config(run)
    answered = "rollouts/step_000004.jsonl.part"
    code, _ = learn(world, config, "open", answered, 0)
    assert code == -signal.SIGKILL
    assert checkpoints(run) == ["checkpoint-2"]
    assert len(numbers(run)) == 3  # of which the third will be made again
    half = ".unfinished/checkpoint-6/trainer_state.json"
    code, printed = learn(world, config, "open", half, 0)
    assert code == -signal.SIGKILL, printed
    assert f"Going on from {run / 'checkpoint-2'}" in printed
    assert checkpoints(run) == ["checkpoint-2", "checkpoint-4"]
    assert (run / ".unfinished" / "checkpoint-6" / "model.safetensors").exists()
    removed = f"{run.name}/checkpoint-4"  # to remove it, at the end
    code, printed = learn(world, config, "os.rename", removed, 0)
    assert code == -signal.SIGKILL, printed
    assert f"Going on from {run / 'checkpoint-4'}" in printed
    assert checkpoints(run) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    code, printed = learn(world, config)
    assert code == 0, printed
    assert "Finished at step 8" in printed
    assert (run / "report.html").exists()
    assert_the_same_run(run, world.whole)
    assert_every_sample_is_logged_once(run, world.data)
    assert_every_step_is_built_again(run)
    assert checkpoints(run) == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.nightly
@pytest.mark.req("RUN-01")
def test_ten_random_kills_change_nothing(world: World) -> None:
    """Each kill is a random time after a random file of the run was opened."""
    chance = random.Random()
    runs = (world.folder / f"random_{number}" for number in count())
    config = world.config(run := next(runs))
    names = ("metrics.jsonl", ".part", "trainer_state.json", "rng_state.pth", "rollout_calls.jsonl")
    kills = 0
    while kills < 10:
        ended, printed = learn(world, config, "open", chance.choice(names), chance.uniform(0, 2))
        assert ended in (0, -signal.SIGKILL), printed
        kills += ended != 0
        if ended == 0:
            assert_the_same_run(run, world.whole)
            config = world.config(run := next(runs))
    assert learn(world, config)[0] == 0
    assert_the_same_run(run, world.whole)
    assert_every_sample_is_logged_once(run, world.data)


ROOT = Path(__file__).resolve().parents[2]
# Of a small tmpfs in a mount namespace of the run; the checkpoint is larger.
DISK = "2m"
# Prints the files at the end, which are not visible outside the namespace.
RUN = """
mount -t tmpfs -o size=$1 tmpfs "$2" || exit 99
"$3" -c 'from learner.cli import main; main()' train --config "$4"
code=$?
cd "$2" && find . -type f
exit $code
"""


@pytest.mark.req("RUN-01", "MET-03")
def test_a_full_disk_ends_the_run_in_one_line_without_a_partial_checkpoint(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    disk, config = tmp_path / "disk", tmp_path / "config.yaml"
    disk.mkdir()
    training = {"max_steps": 1, "save_steps": 1}
    mapping = small_mapping(toy_checkpoint, toy_data, disk / "run", training=training)
    config.write_text(dump_mapping(mapping))
    run = subprocess.run(
        [
            *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", RUN, "sh"),
            *(DISK, str(disk), sys.executable, str(config)),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if run.returncode == 99 or run.stderr.startswith("unshare:"):
        pytest.skip(run.stderr.strip())
    assert run.returncode == 1, run.stderr
    checkpoint = disk / "run" / "checkpoint-1"
    errors = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert errors == [
        f"error: cannot write {checkpoint}: No space left on device. Make room on that disk, or "
        "set training.output_dir to a folder on another disk, and start again"
    ]
    assert "Traceback" not in run.stderr
    files = {line for line in run.stdout.splitlines() if line.startswith("./run/")}
    assert "./run/metrics.jsonl" in files
    assert not [file for file in files if "checkpoint" in file or file.endswith(".part")]
