"""A training run of seconds on the toy model: its config, its parts, hand-made answers."""

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.stages.formats.coord_json import serialize_objects
from learner.types import GroundTruthObject, RolloutOutput

WARMUP = Path(__file__).parents[2] / "configs" / "demo" / "warmup.yaml"
ConfigOf = Callable[..., Config]
RunYaml = Callable[..., Path]


def small_mapping(model: Path, data: ToyData, out: Path, /, **sections: Any) -> dict[str, Any]:
    """The demo's warm-up cut down to 3 steps of 4 samples; `sections` are merged over it."""
    small = {
        "model": {"model": str(model)},
        "data": {"train_jsonl": str(data.train_jsonl), "val_jsonl": str(data.val_jsonl)},
        "training": {
            "run_name": "small",
            "output_dir": str(out),
            "seed": 11,
            "max_steps": 3,
            "save_steps": 3,
            "effective_batch_size": 4,
        },
        "global_max_length": 640,
        "stage2_ab": {"schedule": {"b_ratio": 0.0}},
        "rollout_matching": {"max_new_tokens": 16},
    }
    return merge(merge(load_mapping(WARMUP), small), sections)


def small_config(model: Path, data: ToyData, out: Path, /, **sections: Any) -> Config:
    return parse_config(small_mapping(model, data, out, **sections))


@pytest.fixture
def config_of(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> ConfigOf:
    """`small_config` of a run of the toy model in `tmp_path / "run"`, from its sections."""
    return partial(small_config, toy_checkpoint, toy_data, tmp_path / "run")


@pytest.fixture
def run_yaml(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> RunYaml:
    """Writes what `config_of` gives to `tmp_path / "run.yaml"`."""

    def write(**sections: Any) -> Path:
        mapping = small_mapping(toy_checkpoint, toy_data, tmp_path / "run", **sections)
        path = tmp_path / "run.yaml"
        path.write_text(dump_mapping(mapping), encoding="utf-8")
        return path

    return write


def written(*objects: GroundTruthObject) -> str:
    """A complete answer, as the learner would write it."""
    return serialize_objects(objects, "desc_first")


def rollout(prompt_ids: list[int], answer_ids: list[int]) -> RolloutOutput:
    return RolloutOutput(prompt_ids, answer_ids, "", "stop", False, (1, 1), None)


def run_quietly(config: Config) -> Path:
    from rich.console import Console

    # Seconds, which pure tests do without.
    from learner.training.input_checks import check_inputs
    from learner.training.train import train

    return train(config, check_inputs(config), [], Console(file=io.StringIO()))


def metric_lines(folder: Path, key: str = "") -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if not key or key in line]
