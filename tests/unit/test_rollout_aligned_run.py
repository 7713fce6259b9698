"""A run of the rollout-aligned variant: the shipped smoke profile on toy data with polygons."""

import math
from pathlib import Path
from typing import Any

import pytest

from learner.config import load_config, merge
from learner.config.yaml12 import dump_mapping
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from tests.unit.small_run import metric_lines, run_quietly

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


@pytest.fixture(scope="module")
def lines(config: Path) -> list[dict[str, Any]]:
    return metric_lines(run_quietly(load_config(config)))


@pytest.mark.req("RES-02", "LOSS-04", "LOSS-05", "CHB-01")
def test_every_step_is_channel_b_and_its_finite_atoms_add_up(lines: list[dict[str, Any]]) -> None:
    steps = [line for line in lines if "loss" in line]
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


@pytest.mark.req("MET-02", "RES-10")
def test_no_metric_of_training_is_an_iou_and_the_evaluation_scores_all_held_out_objects(
    lines: list[dict[str, Any]], poly_data: ToyData
) -> None:
    keys = {key for line in lines for key in line}
    assert {"stage2_ab/channel_b/match_rate", "rollout/parse_truncated_rate"} <= keys
    trained = [key for key in keys if not key.startswith("eval/")]  # which has F1@mIoU
    assert [key for key in trained if "iou" in key.lower()] == []
    samples = read_samples(poly_data.val_jsonl, allow_poly=True)
    (scores,) = [line for line in lines if "eval/f1" in line]
    assert scores["eval/ground_truths"] == sum(len(sample.objects) for sample in samples)
