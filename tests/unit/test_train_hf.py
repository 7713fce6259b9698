"""A whole run of channel B whose answers come from the learner itself."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.rollout.seeds import request_seed
from learner.training.start_checks import check_inputs, reach_servers
from learner.training.train import train
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
HF = {"rollout_backend": "hf", "max_new_tokens": 12, "decode_batch_size": 4}


def config_of(model: Path, data: ToyData, out: Path, rollout: dict[str, Any]) -> Config:
    mapping = small_mapping(model, data, out)
    mapping["rollout_matching"] = {**HF, **rollout}
    both = {
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "training": {"eval_strategy": "steps", "eval_steps": STEPS},
    }
    return parse_config(merge(mapping, both))


def run(config: Config) -> list[dict[str, Any]]:
    clients = reach_servers(config)
    assert clients == []
    folder = train(config, check_inputs(config), clients, Console(file=io.StringIO()))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.req("ARCH-03", "CHB-01", "SEED-02")
@pytest.mark.parametrize(
    "rollout",
    [
        {},
        {"decode_mode": "sampling", "decoding": {"temperature": 1.0, "top_p": 0.9}},
        {"decode_mode": "beam", "num_beams": 2},
    ],
    ids=["greedy", "sampling", "beam"],
)
def test_a_run_without_servers_repeats_itself(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, rollout: dict[str, Any]
) -> None:
    first, again = (
        run(config_of(toy_checkpoint, toy_data, tmp_path / name, rollout)) for name in ("a", "b")
    )
    steps = [line for line in first if "loss" in line]
    assert [line["step/channel_b"] for line in steps] == [0, 1, 0]
    assert steps[1]["sync/weights_version"] == 1
    assert any("eval/f1" in line for line in first)
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (first, again)]
    assert losses[0] == losses[1]


@pytest.mark.req("SEED-02", "MET-01")
def test_batches_are_logged_with_their_seeds_and_no_servers_are_counted(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    lines = run(config_of(toy_checkpoint, toy_data, tmp_path / "run", {"decode_batch_size": 3}))
    log = (tmp_path / "run" / "rollout_calls.jsonl").read_text().splitlines()
    record, _ = (json.loads(line) for line in log)
    seed = request_seed(record["rollout_seed_base"], 0, 0)
    assert record["step"] == 2
    assert record["calls"] == [
        {
            "server": "the learner",
            "first": first,
            "count": count,
            "seed": seed + first,
            "attempt": 1,
            "outcome": "answered",
        }
        for first, count in ((0, 3), (3, 1))
    ]
    counted = {"rollout/servers_healthy", "rollout/retries", "sync/pushes", "sync/fell_back"}
    assert not any(counted & line.keys() for line in lines)


@pytest.mark.req("MET-03")
def test_the_record_of_a_run_says_who_generated(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    run(config_of(toy_checkpoint, toy_data, tmp_path / "run", {}))
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["rollout_backend"], facts["servers"], facts["sync_mode"]) == ("hf", [], None)
    assert "transformers" in facts["rollouts"]
