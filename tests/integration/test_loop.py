"""The whole loop on real parts: `learner train`, real vLLM, real pushes.

The run starts from a model that answers every scene with one memorized object. The run's scenes
have that object and another one, so each answer has a match and misses an object.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from learner.cli import app
from learner.config import load_config
from learner.data.toy import ToyData, make_data
from learner.runs.run_folder import RunFolder
from learner.training.input_checks import check_inputs
from learner.training.server_checks import reach_servers
from learner.training.train import train
from tests.contract.running_server import RunningServer, by_servers
from tests.integration.ranks import Nursery
from tests.integration.runs import check_alignment, logged_answers, write_config
from tests.unit.grouped import POLICY_GRADIENT, group_config
from tests.unit.small_run import metric_lines, run_quietly, small_config

SCENES, MEMORY_STEPS, STEPS = 4, 60, 4
MEMORIZED = {"desc": "red ellipse", "bbox_2d": [100, 200, 300, 400]}
MISSED = {"desc": "blue triangle", "bbox_2d": [500, 500, 900, 900]}
CHANNEL_B = "stage2_ab/channel_b"
# In nats, of float32 on the CPU.
MOST_MISMATCH = 1e-3


@dataclass(frozen=True)
class Run:
    folder: Path
    lines: list[dict[str, Any]]

    def of(self, channel: str) -> list[dict[str, Any]]:
        wanted = float(channel == "B")
        return [line for line in self.lines if line.get("step/channel_b") == wanted]


@pytest.fixture(scope="module")
def run(
    server: RunningServer,
    tied: Path,
    toy_checkpoint: Path,
    started: Nursery,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Run]:
    """A run of `learner train` in which channels A and B take turns."""
    folder = tmp_path_factory.mktemp("loop")
    drawn = make_data(server.media / "loop", train=SCENES, val=1, seed=0)
    model = memorizing(toy_checkpoint, drawn, folder)
    annotate(drawn.train_jsonl, MEMORIZED, MISSED)
    config = write_config(
        model,
        drawn,
        folder,
        training={
            "effective_batch_size": SCENES,
            "learning_rate": 1e-4,
            "max_steps": STEPS,
            "save_steps": STEPS,
        },
        stage2_ab={"schedule": {"b_ratio": 0.5}},
        rollout_matching={
            "max_new_tokens": 96,
            "logprobs": True,
            "max_logprob_mismatch": MOST_MISMATCH,
            "vllm": by_servers(server.process.base_url),
        },
    )
    try:
        code, printed = started.run(["train", "--config", str(config)], folder)
        assert code == 0, printed
        yield Run(folder / "run", metric_lines(folder / "run"))
    finally:
        server.push(tied)


def memorizing(model: Path, scenes: ToyData, folder: Path) -> Path:
    """A checkpoint that answers all scenes with `MEMORIZED`: channel A alone, without a server."""
    annotate(scenes.train_jsonl, MEMORIZED)
    training = {
        "max_steps": MEMORY_STEPS,
        "save_steps": MEMORY_STEPS,
        "effective_batch_size": SCENES,
        "learning_rate": 4e-3,
    }
    out = run_quietly(small_config(model, scenes, folder / "memory", training=training))
    return out / f"checkpoint-{MEMORY_STEPS}"


def annotate(scenes: Path, *objects: dict[str, Any]) -> None:
    lines = [json.loads(line) | {"objects": objects} for line in scenes.read_text().splitlines()]
    scenes.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.req("CHB-01", "APPEND-02", "MET-02", "STEP-02")
def test_channel_b_matches_and_appends_every_ground_truth(run: Run) -> None:
    for line in run.of("B"):
        matched, appended = line[f"{CHANNEL_B}/matched"], line[f"{CHANNEL_B}/fn_appended"]
        assert line["packing/post_rollout_segments"] == SCENES
        assert matched + appended == 2 * SCENES
        assert matched > 0
        assert appended > 0
        assert line[f"{CHANNEL_B}/N_valid_pred"] == matched + line[f"{CHANNEL_B}/false_positives"]
        assert line["rollout/per_second"] > 0


@pytest.mark.req("ROLL-01", "CHB-01")
def test_server_mode_produces_token_ids_suitable_for_strict_alignment(run: Run) -> None:
    answers = logged_answers(run.folder)
    assert len(answers) == SCENES * len(run.of("B"))
    check_alignment(load_config(run.folder / "resolved_config.yaml"), answers)


@pytest.mark.req("SYNC-02", "SYNC-07", "SYNC-09")
def test_every_rollout_step_pushes_the_next_version_first(run: Run) -> None:
    first, second = (line["sync/weights_version"] for line in run.of("B"))
    assert second == first + 1
    assert [line["sync/pushes"] for line in run.of("B")] == [1, 1]
    assert [answer.weights_version for answer in logged_answers(run.folder)] == [
        *[(first, first)] * SCENES,
        *[(second, second)] * SCENES,
    ]


@pytest.mark.req("LOGP-01", "ROLL-01", "SYNC-02")
def test_engine_and_trainer_give_kept_tokens_the_same_log_probabilities(run: Run) -> None:
    """They agree for the checkpoint's weights and for those that a step has changed."""
    for line in run.of("B"):
        assert line["mismatch/tokens"] > 0
        assert 0 < line["mismatch/all_mean"] <= line["mismatch/all_p99"] < MOST_MISMATCH
    assert not any(key.startswith("mismatch/") for line in run.of("A") for key in line)


@pytest.mark.timeout(600)
@pytest.mark.req("GROUP-01", "GROUP-03", "GROUP-04")
def test_a_run_learns_from_groups_of_sampled_answers_and_is_replayed(
    server: RunningServer, tied: Path, toy_checkpoint: Path, tmp_path: Path
) -> None:
    """Rollouts and log-probabilities are vLLM's."""
    samples, size, steps = 2, 4, 2
    drawn = make_data(server.media / "groups", train=samples * steps, val=1, seed=0)
    module = POLICY_GRADIENT | {"config": POLICY_GRADIENT["config"] | {"kl_weight": 0.1}}
    config = group_config(
        toy_checkpoint,
        drawn,
        tmp_path / "run",
        training={
            "max_steps": steps,
            "save_strategy": "no",
            "effective_batch_size": samples,
            "learning_rate": 1e-3,
        },
        stage2_ab={"pipeline": {"objective": [module]}},
        group_relative={"group_size": size},
        rollout_matching={
            "max_new_tokens": 24,
            "max_logprob_mismatch": MOST_MISMATCH,
            "vllm": by_servers(server.process.base_url),
        },
    )
    try:
        folder = train(config, check_inputs(config), reach_servers(config), Console(quiet=True))
    finally:
        server.push(tied)
    logged = metric_lines(folder, "step/channel_b")
    assert [line["step/channel_b"] for line in logged] == [1.0] * steps
    for number, line in enumerate(logged, start=1):
        answers = RunFolder.open(folder).answers(number)
        assert len(answers) == line["packing/post_rollout_segments"] == samples * size
        seeds = [answer.seed for answer in answers]
        assert seeds == list(range(seeds[0] or 0, (seeds[0] or 0) + len(seeds)))
        assert len({tuple(answer.response_token_ids) for answer in answers}) > samples
        assert line["policy_gradient/ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert line["policy_gradient/clip_fraction"] == 0
        assert line["mismatch/tokens"] == sum(len(answer.logprobs or []) for answer in answers)
        assert line["stage2_ab/channel_b/fn_appended"] == 0
    first, second = (line["policy_gradient/kl"] for line in logged)
    assert first == pytest.approx(0, abs=1e-7)
    assert second >= first
    replayed = CliRunner().invoke(app, ["replay", str(folder)])
    assert replayed.exit_code == 0, replayed.output
