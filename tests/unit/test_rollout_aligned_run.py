"""A run of the rollout-aligned variant: the shipped smoke profile on toy data with polygons."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from learner.config import load_config, merge
from learner.config.schema import Config
from learner.config.yaml12 import dump_mapping
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from learner.distributed.peers import SINGLE_PROCESS
from learner.models.load import LoadedModel, load_model
from learner.training.input_checks import check_inputs
from learner.training.train import train_as

SMOKE = Path(__file__).parents[2] / "configs/stage2_rollout_aligned/smoke/default.yaml"
STEPS = 2
SAMPLES = 4


@pytest.fixture(scope="module")
def poly_data(tmp_path_factory: pytest.TempPathFactory) -> ToyData:
    out = tmp_path_factory.mktemp("poly_data") / "data"
    return make_data(out, train=12, val=3, seed=0, polygons=True)


@pytest.fixture(scope="module")
def config(
    toy_checkpoint: Path, poly_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The profile with the toy model and data. The learner answers by itself."""
    folder = tmp_path_factory.mktemp("aligned")
    own = {
        "model": {"model": str(toy_checkpoint), "torch_dtype": "float32"},
        "template": {"prompt": "Detect every object in the image."},
        "data": {"train_jsonl": str(poly_data.train_jsonl), "val_jsonl": str(poly_data.val_jsonl)},
        "training": {
            "output_dir": str(folder / "run"),
            "logging_dir": str(folder / "run" / "tensorboard"),
            "max_steps": STEPS,
            "effective_batch_size": SAMPLES,
            "eval_strategy": "steps",
            "eval_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": STEPS,
            "learning_rate": 1.0e-3,
        },
        "global_max_length": 240,
        "rollout_matching": {
            "rollout_backend": "hf",
            "max_new_tokens": 12,
            "eval_detection": {"enabled": True},
        },
    }
    mapping = merge(load_config(SMOKE).model_dump(mode="json", exclude_none=True), own)
    file = folder / "train.yaml"
    file.write_text(dump_mapping(mapping))
    return file


@dataclass(frozen=True)
class Run:
    """lines: of metrics.jsonl. tokens: of each forward that was trained on."""

    lines: list[dict[str, Any]]
    tokens: list[int]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "loss" in line]


@pytest.fixture(scope="module")
def run(config: Path) -> Run:
    tokens: list[int] = []

    def note(_: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and arguments.get("pixel_values") is not None:
            tokens.append(arguments["input_ids"].numel())

    def watched(config: Config) -> LoadedModel:
        loaded = load_model(config)
        loaded.model.register_forward_pre_hook(note, with_kwargs=True)
        return loaded

    parsed = load_config(config)
    train_as(SINGLE_PROCESS, parsed, check_inputs(parsed), [], Console(quiet=True), watched)
    lines = (config.parent / "run" / "metrics.jsonl").read_text().splitlines()
    return Run([json.loads(line) for line in lines], tokens)


@pytest.mark.req("RES-02", "LOSS-04", "LOSS-05", "CHB-01")
def test_every_step_is_channel_b_and_its_finite_atoms_add_up(run: Run) -> None:
    steps = run.steps
    assert [line["step/channel_b"] for line in steps] == [1] * STEPS
    for line in steps:
        atoms = {key: value for key, value in line.items() if key.startswith("loss/")}
        assert {key.removeprefix("loss/") for key in atoms} == {
            "B_rollout_text/struct_ce",
            "B_coord/coord_soft_ce",
            "B_coord/coord_w1",
            "B_coord/coord_gate",
        }
        assert all(math.isfinite(value) for value in atoms.values())
        assert sum(atoms.values()) == pytest.approx(line["loss"], abs=1e-4)
        assert atoms["loss/B_coord/coord_soft_ce"] > 0
        assert line["stage2_ab/channel_b/fn_appended"] >= SAMPLES, (
            "an untrained model finds nothing"
        )


@pytest.mark.req("RES-08", "PACK-01", "STEP-02")
def test_every_pack_has_one_forward(run: Run) -> None:
    steps, tokens = run.steps, run.tokens
    packs = sum(int(line["packing/post_rollout_packs"]) for line in steps)
    assert len(tokens) == packs < STEPS * SAMPLES
    assert max(tokens) <= 240
    assert sum(tokens) == sum(line["packing/post_rollout_selected_total_len"] for line in steps)


@pytest.mark.req("MET-02", "RES-10")
def test_no_metric_of_training_is_an_iou_and_the_evaluation_scores_all_held_out_objects(
    run: Run, poly_data: ToyData
) -> None:
    keys = {key for line in run.lines for key in line}
    assert {"stage2_ab/channel_b/match_rate", "rollout/parse_truncated_rate"} <= keys
    trained = [key for key in keys if not key.startswith("eval/")]  # which has F1@mIoU
    assert [key for key in trained if "iou" in key.lower()] == []
    samples = read_samples(poly_data.val_jsonl, allow_poly=True)
    (scores,) = [line for line in run.lines if "eval/f1" in line]
    assert scores["eval/ground_truths"] == sum(len(sample.objects) for sample in samples)
