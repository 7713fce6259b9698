"""The whole loop on real parts: a real server, real training, real pushes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from learner.config import dump_mapping, load_config, load_mapping, merge, parse_config
from learner.data.toy import ToyData, make_data
from learner.models.toy import make_model
from learner.rollout.server_process import free_ports
from tests.contract.running_server import (
    START_TIMEOUT_S,
    RunningServer,
    start_server,
    stop_server,
)
from tests.integration.alignment import check_alignment, logged_answers
from tests.integration.recorded_run import greedy_answers, run_recorded

ROOT = Path(__file__).resolve().parents[2]
WARMUP_STEPS = 80
TWO_CHANNEL_STEPS = 6
CHANNEL_B = "stage2_ab/channel_b"
# In nats, of float32 on the CPU.
MOST_MISMATCH = 1e-3
GUARD = {"enabled": True, "max_consecutive_token_repeats": 24, "max_object_keys": 12}


@dataclass(frozen=True)
class Loop:
    """A server of the toy model, the scenes it may read, and a folder for runs."""

    server: RunningServer
    data: ToyData
    model: Path
    folder: Path

    def config(self, name: str, run: str, model: Path, **training: Any) -> dict[str, Any]:
        (group_port,) = free_ports(1)
        address = {"base_url": self.server.process.base_url, "group_port": group_port}
        overrides = {
            "model": {"model": str(model)},
            "data": {
                "train_jsonl": str(self.data.train_jsonl),
                "val_jsonl": str(self.data.val_jsonl),
            },
            "training": {"output_dir": str(self.folder / run), **training},
            "rollout_matching": {
                "repeat_terminate": GUARD,
                "logprobs": True,
                "max_logprob_mismatch": MOST_MISMATCH,
                "vllm": {"server": {"servers": [address]}},
            },
        }
        return merge(load_mapping(ROOT / "configs" / "demo" / f"{name}.yaml"), overrides)

    def train(self, config: dict[str, Any]) -> Path:
        """A run of `learner train` that succeeds; returns the run folder."""
        result = self.try_to_train(config)
        assert result.returncode == 0, result.stderr
        return Path(config["training"]["output_dir"])

    def try_to_train(self, config: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Run `learner train` as a user does."""
        run = Path(config["training"]["output_dir"])
        file = run.with_suffix(".yaml")
        file.write_text(dump_mapping(config))
        command = [sys.executable, "-c", "from learner.cli import main; main()"]
        return subprocess.run(
            [*command, "train", "--config", str(file)],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    folder = tmp_path_factory.mktemp("loop")
    model = folder / "model"
    make_model(model, seed=0)
    server = start_server(model, folder / "server", *guarded_as_the_run(folder))
    try:
        data = make_data(server.media / "toy", train=512, val=16, seed=0)
        server.process.wait_until_healthy(START_TIMEOUT_S)
        yield Loop(server, data, model, folder)
    finally:
        stop_server(server)


def guarded_as_the_run(folder: Path) -> tuple[str, ...]:
    """The options of a server that has the repeat guard of the runs here."""
    run_config = folder / "run.yaml"
    demo = load_mapping(ROOT / "configs" / "demo" / "two_channel.yaml")
    run_config.write_text(
        dump_mapping(merge(demo, {"rollout_matching": {"repeat_terminate": GUARD}}))
    )
    return ("--run-config", str(run_config))


@pytest.fixture(scope="module")
def warm(loop: Loop) -> Path:
    """A checkpoint that answers in the right form: channel A alone, no server needed."""
    steps = {"max_steps": WARMUP_STEPS, "save_steps": WARMUP_STEPS}
    run = loop.train(loop.config("warmup", "warmup", loop.model, **steps))
    return run / f"checkpoint-{WARMUP_STEPS}"


@pytest.fixture(scope="module")
def two_channel(loop: Loop, warm: Path) -> Path:
    """A two-channel run that evaluates at its end."""
    return loop.train(loop.config("two_channel", "two", warm, **short_run()))


def short_run() -> dict[str, Any]:
    steps = TWO_CHANNEL_STEPS
    return {"max_steps": steps, "save_steps": steps, "eval_strategy": "steps", "eval_steps": steps}


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path, channel: str) -> list[dict[str, Any]]:
    wanted = float(channel == "B")
    return [line for line in logged(run) if line.get("step/channel_b") == wanted]


@pytest.mark.req("CFG-01", "RUN-02", "STEP-01")
def test_a_run_alternates_channels_and_leaves_a_run_folder(two_channel: Path) -> None:
    assert [line["step"] for line in steps_of(two_channel, "B")] == [2, 4, 6]
    assert [line["step"] for line in steps_of(two_channel, "A")] == [1, 3, 5]
    assert {"resolved_config.yaml", "run.json"} <= {path.name for path in two_channel.iterdir()}
    assert list((two_channel / "tensorboard").glob("events.*"))


@pytest.mark.req("CHB-01", "APPEND-02", "MET-02", "STEP-02")
def test_channel_b_matches_and_appends_every_ground_truth(two_channel: Path) -> None:
    for line in steps_of(two_channel, "B"):
        matched, appended = line[f"{CHANNEL_B}/matched"], line[f"{CHANNEL_B}/fn_appended"]
        assert line["packing/post_rollout_segments"] == 32
        assert 32 <= matched + appended <= 64
        assert line[f"{CHANNEL_B}/N_valid_pred"] == matched + line[f"{CHANNEL_B}/false_positives"]
        assert line["rollout/per_second"] > 0
    assert sum(line[f"{CHANNEL_B}/N_valid_pred"] for line in steps_of(two_channel, "B")) > 0
    assert sum(line[f"{CHANNEL_B}/fn_appended"] for line in steps_of(two_channel, "B")) > 0


@pytest.mark.req("ROLL-01", "CHB-01")
def test_server_mode_produces_token_ids_suitable_for_strict_alignment(two_channel: Path) -> None:
    answers = logged_answers(two_channel)
    assert len(answers) == 32 * TWO_CHANNEL_STEPS / 2
    check_alignment(load_config(two_channel / "resolved_config.yaml"), answers)


@pytest.mark.req("REP-04", "MET-02")
def test_the_guard_of_the_runs_yaml_is_active_in_its_servers(two_channel: Path) -> None:
    for line in steps_of(two_channel, "B"):
        assert line["rollout/repeat_terminate_active"] == 1.0


@pytest.mark.req("REP-06")
def test_a_run_refuses_a_server_whose_guard_is_set_differently(loop: Loop, warm: Path) -> None:
    config = loop.config("two_channel", "other_guard", warm, **short_run())
    config["rollout_matching"]["repeat_terminate"] = GUARD | {"max_object_keys": 11}
    result = loop.try_to_train(config)
    assert result.returncode == 2
    assert f"GET {loop.server.process.base_url}/info/ repeat_terminate" in result.stderr
    assert '"max_object_keys":12' in result.stderr
    assert "--run-config" in result.stderr


@pytest.mark.req("SYNC-07", "SYNC-09")
def test_every_rollout_step_pushes_the_next_version_first(two_channel: Path) -> None:
    versions = [line["sync/weights_version"] for line in steps_of(two_channel, "B")]
    assert versions == [versions[0], versions[0] + 1, versions[0] + 2]
    assert all(line["time/push_s"] > 0 for line in steps_of(two_channel, "B"))


@pytest.mark.req("LOGP-01", "ROLL-01")
def test_engine_and_trainer_give_kept_tokens_the_same_log_probabilities(two_channel: Path) -> None:
    for line in steps_of(two_channel, "B"):
        assert line["mismatch/tokens"] > 0
        assert 0 < line["mismatch/all_mean"] <= line["mismatch/all_p99"] < MOST_MISMATCH
    assert not any(
        key.startswith("mismatch/") for line in steps_of(two_channel, "A") for key in line
    )


@pytest.mark.req("LOSS-05", "PACK-05")
def test_logged_atoms_add_up_to_the_logged_loss(two_channel: Path) -> None:
    for line in [*steps_of(two_channel, "A"), *steps_of(two_channel, "B")]:
        atoms = sum(value for key, value in line.items() if key.startswith("loss/"))
        assert atoms == pytest.approx(line["loss"], abs=1e-4 * max(1.0, abs(line["loss"])))
        assert 0 < line["packing/post_rollout_fill"] <= 1


@pytest.mark.req("SEED-02")
def test_the_same_seed_gives_the_same_numbers(loop: Loop, warm: Path, two_channel: Path) -> None:
    again = loop.train(loop.config("two_channel", "two_again", warm, **short_run()))
    for first, second in zip(logged(two_channel), logged(again), strict=True):
        assert without_clock(first) == without_clock(second)


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    """Without `mismatch/`, too: which answers an engine decodes together is a matter of time."""
    timed = ("time/", "perf/", "train_", "rollout/per_second", "sync/", "eval/sync/", "mismatch/")
    return {key: value for key, value in line.items() if not key.startswith(timed)}


@pytest.mark.req("SYNC-02", "SYNC-03")
@pytest.mark.timeout(600)
def test_after_every_push_the_server_answers_like_a_fresh_engine(loop: Loop, warm: Path) -> None:
    strides = {"learning_rate": 0.01, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    mapping = loop.config("two_channel", "pushes", warm, **strides, max_steps=2, save_strategy="no")
    always = {
        "stage2_ab": {"schedule": {"b_ratio": 1.0}},
        "rollout_matching": {"vllm": {"sync": {"verify": "full"}}},
    }
    config = parse_config(merge(mapping, always))
    recorder = run_recorded(loop.server, config)
    assert len(recorder.said) == 2
    answers = list(recorder.said.values())
    assert answers[0] != answers[1]
    assert not any(result.difference for result in recorder.probed)
    for checkpoint, said in recorder.said.items():
        readable = ("--allowed-media-dir", str(loop.server.media))
        guarded = guarded_as_the_run(checkpoint)
        fresh = start_server(checkpoint, checkpoint / "server", *readable, *guarded)
        try:
            fresh.process.wait_until_healthy(START_TIMEOUT_S)
            assert greedy_answers(fresh, loop.server.media / "toy") == said
        finally:
            stop_server(fresh)


@pytest.mark.req("RUN-02")
def test_a_checkpoint_loads_in_plain_transformers(two_channel: Path) -> None:
    checkpoint = two_channel / f"checkpoint-{TWO_CHANNEL_STEPS}"
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint)
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    assert model.lm_head.weight.shape[0] == len(processor.tokenizer)
