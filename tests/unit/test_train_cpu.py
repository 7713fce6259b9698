"""Whole short runs on the CPU without a server: channel A, and channel B answered by the model."""

import io
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from learner.config import load_config, merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import make_data
from learner.distributed.peers import SINGLE_PROCESS
from learner.models.families.qwen_vl import QWEN_VL
from learner.models.load import LoadedModel, load_model
from learner.models.toy import make_model
from learner.rollout.distribution import request_seed, rollout_seed_base
from learner.training.input_checks import check_inputs
from learner.training.server_checks import reach_servers
from learner.training.train import train_as
from learner.training.trainer import build_optimizer
from shared_contracts.errors import RunError
from tests.unit.refusals import refused
from tests.unit.small_run import ConfigOf, metric_lines, run_quietly
from tests.unit.trained_run import STEPS, TrainedRun


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    model: nn.Module = AutoModelForImageTextToText.from_pretrained(checkpoint)
    return dict(model.named_parameters())


@pytest.mark.req("MET-03")
def test_a_run_folder_has_the_config_and_the_facts_of_the_run(trained_run: TrainedRun) -> None:
    config = load_config(trained_run.config)
    assert load_config(trained_run.folder / "resolved_config.yaml") == config
    assert reach_servers(config) == []
    facts = json.loads((trained_run.folder / "run.json").read_text())
    assert facts["versions"]["torch"] == torch.__version__.split("+")[0]
    assert (facts["rollout_backend"], facts["servers"], facts["sync_mode"]) == ("hf", [], None)
    assert "transformers" in facts["rollouts"]
    assert isinstance(facts["command"], list)
    with refused("training.output_dir", "holds another run"):
        check_inputs(config)


@pytest.mark.req("LOSS-05", "STEP-02", "CHB-01")
def test_every_step_has_a_line_whose_loss_is_the_sum_of_its_atoms(trained_run: TrainedRun) -> None:
    steps = trained_run.lines("loss")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["step/channel_b"] for line in steps] == [0, 1, 0]
    assert steps[1]["sync/weights_version"] == 1
    assert steps[1]["rollout/per_second"] == pytest.approx(4 / steps[1]["time/rollout_s"])
    for line in steps:
        assert line["packing/post_rollout_segments"] == 4
        atoms = [value for key, value in line.items() if key.startswith("loss/")]
        assert sum(atoms) == pytest.approx(line["loss"], abs=1e-4)
        assert line["grad_norm"] > 0
    tag = "loss/A2_coord/bbox_ciou"
    board = event_accumulator.EventAccumulator(str(trained_run.folder / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in board.Scalars(f"train/{tag}")]
    assert shown == [(step, pytest.approx(steps[step - 1][tag])) for step in (1, 3)]


@pytest.mark.req("SEED-01", "SEED-02", "DIST-05", "MET-01", "ARCH-03")
@pytest.mark.scenario("Same step produces identical derived rollout seed base")
def test_calls_are_logged_with_seeds_and_no_servers_are_counted(trained_run: TrainedRun) -> None:
    log = (trained_run.folder / "rollout_calls.jsonl").read_text().splitlines()
    (record,) = (record for record in map(json.loads, log) if "step" in record)
    call = {"server": "the learner", "first": 0, "count": 4, "attempt": 1, "outcome": "answered"}
    assert record["step"] == 2
    base = rollout_seed_base(load_config(trained_run.config).training.seed, 1)
    assert record["rollout_seed_base"] == base
    assert [line["rollout/seed_base"] for line in trained_run.lines("rollout/seed_base")] == [base]
    assert record["calls"] == [call | {"seed": request_seed(base, 0, 0)}]
    counted = {"rollout/servers_healthy", "rollout/retries", "sync/pushes", "sync/fell_back"}
    assert not any(counted & line.keys() for line in metric_lines(trained_run.folder))


@pytest.mark.req("RUN-02")
def test_the_checkpoint_loads_in_plain_transformers_with_its_processor(
    trained_run: TrainedRun, toy_checkpoint: Path
) -> None:
    checkpoint = trained_run.folder / f"checkpoint-{STEPS}"
    after, before = weights_of(checkpoint), weights_of(toy_checkpoint)
    assert after.keys() == before.keys()
    assert all(torch.isfinite(w).all() for w in after.values())
    changed = {
        QWEN_VL.part_of(name) for name, w in after.items() if not torch.equal(w, before[name])
    }
    assert changed == {"language", "vision", "aligner"}
    ours, theirs = (AutoProcessor.from_pretrained(p) for p in (checkpoint, toy_checkpoint))
    text = '{"object_1": {"desc": "red ellipse", "bbox_2d": ["<|coord_12|>"]}}'
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    assert ours.tokenizer.chat_template == theirs.tokenizer.chat_template
    assert ours.image_processor.to_dict() == theirs.image_processor.to_dict()


def test_a_parameter_has_the_rate_of_its_part_and_at_zero_no_gradient(config_of: ConfigOf) -> None:
    rates = {"learning_rate": 3e-4, "vit_lr": 0.0, "aligner_lr": 1e-4, "weight_decay": 0.1}
    betas = {"adam_beta1": 0.8, "adam_beta2": 0.7}
    config = config_of(training=rates | betas)
    model = load_model(config).model
    groups = build_optimizer(model, config.training).param_groups
    assert {group["betas"] for group in groups} == {(0.8, 0.7)}
    placed = {id(p): group for group in groups for p in group["params"]}
    assert len(placed) == sum(len(group["params"]) for group in groups)
    parts: dict[str, set[str]] = {part: set() for part in ("language", "vision", "aligner")}
    for name, parameter in model.named_parameters():
        part, group = QWEN_VL.part_of(name), placed.get(id(parameter))
        parts[part].add(name)
        assert parameter.requires_grad is (group is not None) is (part != "vision"), name
        if group is not None:
            assert group["lr"] == (3e-4 if part == "language" else 1e-4), name
            assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0), name
    assert all("language_model" in name for name in parts["language"])
    for part, word in (("language", "embed_tokens"), ("vision", "patch_embed")):
        assert any(word in name for name in parts[part])
    for word in (".visual.merger.", "deepstack_merger_list"):
        assert any(word in name for name in parts["aligner"])


@pytest.fixture
def umask() -> Iterator[int]:
    """A umask that is no usual default and that masks some bits of group and others."""
    before = os.umask(0o026)
    yield 0o026
    os.umask(before)


@pytest.mark.req("RUN-01", "MET-03")
def test_every_file_of_a_run_and_of_a_made_model_has_the_mode_of_the_umask(
    config_of: ConfigOf, tmp_path: Path, umask: int
) -> None:
    tuner = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 2}
    training = {"max_steps": 1, "save_steps": 1}
    run_quietly(config_of(training=training, tuner=tuner))
    make_model(tmp_path / "model", 0, tie=True)
    paths = list(tmp_path.rglob("*"))
    assert {path.suffix for path in paths} >= {".safetensors", ".pt", ".html", ".jsonl", ".yaml"}
    modes = {str(path): oct(path.stat().st_mode & 0o777) for path in paths}
    wanted = {str(path): oct((0o777 if path.is_dir() else 0o666) & ~umask) for path in paths}
    assert modes == wanted


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_update(
    toy_checkpoint: Path, config_of: ConfigOf, tmp_path: Path
) -> None:
    """Its loss is finite, because logits are bounded (LOSS-04)."""
    model = shutil.copytree(toy_checkpoint, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.language_model.layers.1.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    training = {"packing": False, "save_steps": 1}
    with pytest.raises(RunError, match=r"step 1: the gradient's norm is nan"):
        run_quietly(config_of(training=training, model={"model": str(model)}))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


SMOKE = Path(__file__).parents[2] / "configs/stage2_rollout_aligned/smoke/default.yaml"


@pytest.mark.req("RES-02", "LOSS-04", "LOSS-05", "CHB-01", "MET-02", "RES-10")
def test_every_rollout_aligned_step_is_channel_b_and_the_evaluation_scores_all_held_out_objects(
    toy_checkpoint: Path, tmp_path: Path
) -> None:
    """The shipped smoke profile with the toy model, on toy data with polygons."""
    data = make_data(tmp_path / "data", train=12, val=3, seed=0, polygons=True)
    own = {
        "model": {"model": str(toy_checkpoint), "torch_dtype": "float32"},
        "template": {"prompt": "Detect every object in the image."},
        "data": {"train_jsonl": str(data.train_jsonl), "val_jsonl": str(data.val_jsonl)},
        "training": {
            "output_dir": str(tmp_path / "run"),
            "logging_dir": str(tmp_path / "run" / "tensorboard"),
            "max_steps": 2,
            "effective_batch_size": 4,
            "eval_strategy": "steps",
            "eval_steps": 2,
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
    assert [line["step/channel_b"] for line in steps] == [1] * 2
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
        assert line["stage2_ab/channel_b/fn_appended"] >= 4, "it is untrained"
        assert [key for key in line if "iou" in key.lower()] == []
    held_out = read_samples(data.val_jsonl, allow_poly=True)
    (scores,) = [line for line in lines if "eval/f1" in line]
    assert scores["eval/ground_truths"] == sum(len(sample.objects) for sample in held_out)


class Seen:
    """The types of a run's products, and of what each forward returns to the losses.

    proved: of the logits of the check of packing, which runs before (PACK-04).
    """

    def __init__(self) -> None:
        self.products: set[torch.dtype] = set()
        self.returned: set[torch.dtype] = set()
        self.proved: set[torch.dtype] = set()

    def load(self, config: Config) -> LoadedModel:
        loaded = load_model(config)
        for module in loaded.model.modules():
            if isinstance(module, nn.Linear) and module.out_features < 1000:
                module.register_forward_hook(lambda _, __, found: self.products.add(found.dtype))
        loaded.model.register_forward_hook(self._note)
        return loaded

    def _note(self, model: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output.logits, Tensor):
            self.proved.add(output.logits.dtype)
            return
        assert model.training
        parts = [part for part in output.logits if isinstance(part, Tensor)]
        tensors = [part for part in parts if part.is_floating_point()]
        assert tensors
        self.returned |= {tensor.dtype for tensor in tensors}


@pytest.mark.req("FULL-03", "PACK-04")
def test_a_run_in_16_bits_trains_float32_weights_by_float32_statistics(config_of: ConfigOf) -> None:
    seen, short = Seen(), {"max_steps": 1, "save_strategy": "no"}
    config = config_of(training=short, model={"torch_dtype": "bfloat16"})
    console = Console(file=io.StringIO())
    trainer = train_as(SINGLE_PROCESS, config, check_inputs(config), [], console, seen.load)
    assert seen.products == {torch.bfloat16}
    assert seen.returned == {torch.float32}
    assert seen.proved == {torch.bfloat16}
    assert trainer.model is not None
    assert trainer.optimizer is not None
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    moments = [v for state in trainer.optimizer.state.values() for v in state.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert trainer.accelerator.mixed_precision == "no"
    assert not hasattr(trainer.model, "_original_forward"), "accelerate has wrapped it"
