"""A whole run of the rollout-aligned variant: the shipped smoke profile on the toy world."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from learner.config import load_config, merge
from learner.config.schema import Config
from learner.config.yaml12 import dump_mapping
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from learner.distributed.peers import SINGLE_PROCESS
from learner.models.load import LoadedModel, load_model
from learner.models.packed_forward import PromptEncoder
from learner.rollout.policy import OpenBackend, Policy, asking_of
from learner.training.run_log import CallLog
from learner.training.start_checks import check_inputs, read_inputs
from learner.training.train import RunParts, build_scorer, train_as
from learner.training.trainer import build_optimizer
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.answers import encode
from tests.unit.small_run import rollout, written

pytestmark = pytest.mark.usefixtures("one_thread")

SMOKE = Path(__file__).parents[2] / "configs/stage2_rollout_aligned/smoke/default.yaml"
STEPS = 2
SAMPLES = 4


class Forwards:
    """Counts the forwards that are trained on: those with gradients and images."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def watched(self, config: Config) -> LoadedModel:
        loaded = load_model(config)
        loaded.model.register_forward_pre_hook(self._note, with_kwargs=True)
        return loaded

    def _note(self, _: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and arguments.get("pixel_values") is not None:
            self.tokens.append(arguments["input_ids"].numel())


@pytest.fixture(scope="module")
def poly_data(tmp_path_factory: pytest.TempPathFactory) -> ToyData:
    out = tmp_path_factory.mktemp("poly_data") / "data"
    return make_data(out, train=12, val=3, seed=0, polygons=True)


@pytest.fixture(scope="module")
def config(
    toy_checkpoint: Path, poly_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The profile with the toy world's places, and a learner that answers itself."""
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
def run(config: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Lines of metrics.jsonl, and the tokens of each forward that was trained on."""
    forwards = Forwards()
    parsed = load_config(config)
    train_as(
        SINGLE_PROCESS, parsed, check_inputs(parsed), [], Console(quiet=True), forwards.watched
    )
    lines = (config.parent / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], forwards.tokens


Run = tuple[list[dict[str, Any]], list[int]]


def steps_of(run: Run) -> list[dict[str, Any]]:
    return [line for line in run[0] if "loss" in line]


@pytest.mark.req("RES-02", "LOSS-04", "LOSS-05", "CHB-01")
def test_every_step_is_channel_b_and_its_finite_atoms_add_up(run: Run) -> None:
    steps = steps_of(run)
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
    steps, tokens = steps_of(run), run[1]
    packs = sum(int(line["packing/post_rollout_packs"]) for line in steps)
    assert len(tokens) == packs < STEPS * SAMPLES
    assert max(tokens) <= 240
    assert sum(tokens) == sum(line["packing/post_rollout_selected_total_len"] for line in steps)


@pytest.mark.req("MET-02", "RES-10")
def test_no_metric_is_an_iou(run: Run) -> None:
    keys = {key for line in run[0] for key in line}
    assert "stage2_ab/channel_b/match_rate" in keys
    assert "rollout/parse_truncated_rate" in keys
    trained = [key for key in keys if not key.startswith("eval/")]  # which has F1@mIoU
    assert [key for key in trained if "iou" in key.lower()] == []


@pytest.mark.req("RES-02")
def test_the_run_ends_with_scores_of_all_held_out_objects(run: Run, poly_data: ToyData) -> None:
    samples = read_samples(poly_data.val_jsonl, allow_poly=True)
    (scores,) = [line for line in run[0] if "eval/f1" in line]
    assert scores["eval/ground_truths"] == sum(len(sample.objects) for sample in samples)


class Perfect:
    """Answers every sample with its annotation."""

    def __init__(self, samples: list[Sample], loaded: LoadedModel, encode: PromptEncoder) -> None:
        self._samples = {sample.sample_id: sample for sample in samples}
        self._tokenizer = loaded.tokenizer
        self._encode = encode

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        return [self._answer(self._samples[str(request.uuid)]) for request in requests]

    def push_weights(self, version: int) -> None: ...

    def close(self) -> None: ...

    def _answer(self, sample: Sample) -> RolloutOutput:
        answer = encode(self._tokenizer, written(*sample.objects))
        return rollout(self._encode(sample).ids.tolist(), answer)


@pytest.mark.req("RES-02", "OT-01", "EVAL-01")
def test_right_polygons_are_hits_of_the_evaluation(config: Path, tmp_path: Path) -> None:
    parsed = load_config(config)
    inputs, loaded = read_inputs(parsed), load_model(parsed)
    assert any(o.shape.kind == "poly" for sample in inputs.val for o in sample.objects)
    prompt = PromptEncoder(loaded.processor, parsed.template.prompt, None)
    policy = Policy(OpenBackend(Perfect(inputs.val, loaded, prompt)), asking_of(parsed))
    optimizer = build_optimizer(loaded.model, parsed.training)
    parts = RunParts(parsed, inputs, loaded, optimizer, policy, CallLog(tmp_path))
    scores = build_scorer(parts)(0)
    assert scores["eval/f1"] == 1
    assert scores["eval/dropped"] == 0
    assert scores["eval/ap"] == scores["eval/segm_ap"] == pytest.approx(1)


@pytest.mark.req("RUN-01", "CHB-01")
def test_the_checkpoint_has_learnt_something(run: Run, config: Path, toy_checkpoint: Path) -> None:
    saved = load_file(config.parent / "run" / f"checkpoint-{STEPS}" / "model.safetensors")
    before = load_file(toy_checkpoint / "model.safetensors")
    assert saved.keys() == before.keys()
    moved = {name for name in saved if not torch.equal(saved[name], before[name])}
    assert any(name.startswith("model.visual") for name in moved)
    assert all(torch.isfinite(weight).all() for weight in saved.values())
