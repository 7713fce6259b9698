"""A run of the rollout-aligned variant: the shipped smoke profile on toy data with polygons."""

import math
from pathlib import Path

import pytest

from learner.config import load_config, merge, parse_config
from learner.data.jsonl import read_samples
from learner.data.toy import make_data
from tests.unit.small_run import metric_lines, run_quietly

SMOKE = Path(__file__).parents[2] / "configs/stage2_rollout_aligned/smoke/default.yaml"
STEPS = 2
SAMPLES = 4


@pytest.mark.req("RES-02", "LOSS-04", "LOSS-05", "CHB-01", "MET-02", "RES-10")
def test_every_step_is_channel_b_and_the_evaluation_scores_all_held_out_objects(
    toy_checkpoint: Path, tmp_path: Path
) -> None:
    """The profile with the toy model and data. The learner answers by itself."""
    data = make_data(tmp_path / "data", train=12, val=3, seed=0, polygons=True)
    own = {
        "model": {"model": str(toy_checkpoint), "torch_dtype": "float32"},
        "template": {"prompt": "Detect every object in the image."},
        "data": {"train_jsonl": str(data.train_jsonl), "val_jsonl": str(data.val_jsonl)},
        "training": {
            "output_dir": str(tmp_path / "run"),
            "logging_dir": str(tmp_path / "run" / "tensorboard"),
            "max_steps": STEPS,
            "effective_batch_size": SAMPLES,
            "eval_strategy": "steps",
            "eval_steps": STEPS,
            "save_strategy": "no",
            "learning_rate": 1.0e-3,
        },
        "global_max_length": 240,
        "rollout_matching": {
            "rollout_backend": "hf",
            "max_new_tokens": 12,
            "eval_detection": {"enabled": True},
        },
    }
    smoke = load_config(SMOKE).model_dump(mode="json", exclude_none=True)
    lines = metric_lines(run_quietly(parse_config(merge(smoke, own))))
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
        assert line["stage2_ab/channel_b/fn_appended"] >= SAMPLES, "it is untrained"
        assert [key for key in line if "iou" in key.lower()] == []
    held_out = read_samples(data.val_jsonl, allow_poly=True)
    (scores,) = [line for line in lines if "eval/f1" in line]
    assert scores["eval/ground_truths"] == sum(len(sample.objects) for sample in held_out)
