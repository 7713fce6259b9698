"""Whole runs of three steps on the CPU, channel A alone: no server, everything else real."""

import io
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from learner.config import load_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.models.families.qwen_vl import QWEN_VL
from learner.models.load import load_model
from learner.models.toy import make_model
from learner.rollout.sync.weights import MergedWeights
from learner.runs.checkpoint import MANIFEST
from learner.training.start_checks import check_inputs
from learner.training.train import train
from learner.training.trainer import build_optimizer
from shared_contracts.errors import ContractError
from tests.unit.small_run import small_config

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3


def run(config: Config) -> Path:
    console = Console(file=io.StringIO())
    return train(config, check_inputs(config), [], console)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder) if "loss" in line]


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    model: nn.Module = AutoModelForImageTextToText.from_pretrained(checkpoint)
    return dict(model.named_parameters())


@pytest.fixture(scope="module")
def config(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> Config:
    return small_config(toy_checkpoint, toy_data, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def folder(config: Config) -> Path:
    """The folder of the run that most tests look at."""
    return run(config)


def test_the_resolved_config_loads_again_equal(folder: Path, config: Config) -> None:
    assert load_config(folder / "resolved_config.yaml") == config


def test_run_json_says_what_ran(folder: Path) -> None:
    facts = json.loads((folder / "run.json").read_text())
    assert facts["versions"]["torch"] == torch.__version__.split("+")[0]
    assert facts["servers"] == [{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]
    assert facts["sync_mode"] == "full"
    assert isinstance(facts["command"], list)


@pytest.mark.req("LOSS-05", "STEP-02")
def test_every_step_has_a_line_whose_loss_is_the_sum_of_its_atoms(folder: Path) -> None:
    steps = [line for line in lines(folder) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["step/channel_b"] == 0
        assert line["packing/post_rollout_segments"] == 4
        atoms = [value for key, value in line.items() if key.startswith("loss/A")]
        assert sum(atoms) == pytest.approx(line["loss"], abs=1e-4)
        assert line["time/learn_s"] > 0
        assert line["grad_norm"] > 0


def test_tensorboard_has_the_same_numbers(folder: Path) -> None:
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tag = "train/loss/A2_coord/bbox_ciou"
    shown = [(event.step, event.value) for event in events.Scalars(tag)]
    logged = [(ln["step"], ln["loss/A2_coord/bbox_ciou"]) for ln in lines(folder) if "loss" in ln]
    assert [step for step, _ in shown] == [1, 2, 3]
    assert [value for _, value in shown] == pytest.approx([value for _, value in logged])


@pytest.mark.req("RUN-02")
def test_the_checkpoint_loads_in_plain_transformers_with_its_processor(
    folder: Path, toy_checkpoint: Path
) -> None:
    checkpoint = folder / f"checkpoint-{STEPS}"
    trained, before = weights_of(checkpoint), weights_of(toy_checkpoint)
    assert trained.keys() == before.keys()
    assert all(torch.isfinite(w).all() for w in trained.values())
    changed = {
        QWEN_VL.part_of(name) for name, w in trained.items() if not torch.equal(w, before[name])
    }
    assert changed == {"language", "vision", "aligner"}
    ours, theirs = (AutoProcessor.from_pretrained(p) for p in (checkpoint, toy_checkpoint))
    text = '{"object_1": {"desc": "red ellipse", "bbox_2d": ["<|coord_12|>"]}}'
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    assert ours.tokenizer.chat_template == theirs.tokenizer.chat_template
    assert ours.image_processor.to_dict() == theirs.image_processor.to_dict()


def test_the_same_seed_gives_the_same_losses_and_weights(
    folder: Path, toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    again = run(small_config(toy_checkpoint, toy_data, tmp_path / "again"))
    assert losses(again) == losses(folder)
    first = weights_of(folder / f"checkpoint-{STEPS}")
    second = weights_of(again / f"checkpoint-{STEPS}")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.req("RUN-01")
def test_only_what_a_checkpoint_lacks_is_called_missing(
    folder: Path, toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.trainer")
    logger.addHandler(handler)
    lost = "model.visual.merger.norm.weight"
    try:
        for name, spoil in (("whole", False), ("spoilt", True)):
            again = shutil.copytree(folder, tmp_path / name)
            checkpoint = again / f"checkpoint-{STEPS}"
            file = checkpoint / "model.safetensors"
            weights = load_file(file)
            assert "lm_head.weight" not in weights
            if spoil:
                save_file({n: w for n, w in weights.items() if n != lost}, file, {"format": "pt"})
                manifest = json.loads((checkpoint / MANIFEST).read_text())
                manifest["files"]["model.safetensors"] = file.stat().st_size
                (checkpoint / MANIFEST).write_text(json.dumps(manifest))
            training = {"resume": "auto", "max_steps": STEPS + 1}
            run(small_config(toy_checkpoint, toy_data, again, training=training))
            missing = [line for line in said if "missing keys" in line]
            assert bool(missing) == spoil
            assert all(lost in line and "lm_head" not in line for line in missing)
    finally:
        logger.removeHandler(handler)


def test_another_seed_takes_the_samples_in_another_order(
    folder: Path, toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    other = run(small_config(toy_checkpoint, toy_data, tmp_path / "o", training={"seed": 12}))
    assert losses(other) != losses(folder)


@pytest.mark.req("RUN-02")
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_train_and_can_be_merged_into_the_base(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, use_dora: bool
) -> None:
    tuner = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4, "use_dora": use_dora}
    tuner["train_coordinate_rows"] = False
    folder = run(small_config(toy_checkpoint, toy_data, tmp_path / "lora", tuner=tuner))
    assert len(losses(folder)) == STEPS
    base = AutoModelForImageTextToText.from_pretrained(toy_checkpoint)
    before = {name: p.clone() for name, p in base.named_parameters()}
    adapted = PeftModel.from_pretrained(base, folder / f"checkpoint-{STEPS}")
    merged = dict(MergedWeights(adapted).tensors("float32"))
    assert merged.keys() == before.keys()
    changed = [n for n, w in merged.items() if not torch.equal(w, before[n])]
    assert changed
    assert all("language_model" in name and name.endswith("_proj.weight") for name in changed)


def test_a_learning_rate_of_zero_freezes_the_part(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    training = {"vit_lr": 0.0, "aligner_lr": 0.0, "weight_decay": 0.1}
    folder = run(small_config(toy_checkpoint, toy_data, tmp_path / "run", training=training))
    trained, before = weights_of(folder / f"checkpoint-{STEPS}"), weights_of(toy_checkpoint)
    changed = {
        QWEN_VL.part_of(name) for name, w in trained.items() if not torch.equal(w, before[name])
    }
    assert changed == {"language"}


def test_a_frozen_part_has_no_gradient_and_no_optimizer_state(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    training = {"vit_lr": 0.0, "aligner_lr": 1e-4}
    config = small_config(toy_checkpoint, toy_data, tmp_path / "run", training=training)
    model = load_model(config).model
    optimized = {
        id(p) for g in build_optimizer(model, config.training).param_groups for p in g["params"]
    }
    for name, parameter in model.named_parameters():
        trained = QWEN_VL.part_of(name) != "vision"
        assert parameter.requires_grad is trained, name
        assert (id(parameter) in optimized) is trained, name


def test_every_parameter_is_in_one_group_with_the_rate_of_its_part(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    rates = {"learning_rate": 3e-4, "vit_lr": 2e-4, "aligner_lr": 1e-4, "weight_decay": 0.1}
    config = small_config(toy_checkpoint, toy_data, tmp_path / "run", training=rates)
    model = load_model(config).model
    groups = build_optimizer(model, config.training).param_groups
    placed = {id(p): group for group in groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert len(placed) == sum(len(group["params"]) for group in groups) == len(named)
    rate_of = {"language": 3e-4, "vision": 2e-4, "aligner": 1e-4}
    for name, parameter in named.items():
        group = placed[id(parameter)]
        assert group["lr"] == rate_of[QWEN_VL.part_of(name)], name
        assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0), name


def test_parts_of_the_model_are_told_by_their_names(toy_checkpoint: Path) -> None:
    parts: dict[str, list[str]] = {"language": [], "vision": [], "aligner": []}
    for name in weights_of(toy_checkpoint):
        parts[QWEN_VL.part_of(name)].append(name)
    assert all("language_model" in name for name in parts["language"])
    assert any("embed_tokens" in name for name in parts["language"])
    assert any("patch_embed" in name for name in parts["vision"])
    assert any(".visual.merger." in name for name in parts["aligner"])
    assert any("deepstack_merger_list" in name for name in parts["aligner"])


@pytest.mark.req("STEP-02")
def test_leftover_samples_of_an_epoch_make_no_smaller_step(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    training = {"effective_batch_size": 10, "max_steps": None, "num_train_epochs": 1.0}
    config = small_config(toy_checkpoint, toy_data, tmp_path / "run", training=training)
    steps = [line for line in lines(run(config)) if "loss" in line]
    assert [line["packing/post_rollout_segments"] for line in steps] == [10, 10]


def test_a_folder_with_a_run_in_it_is_refused(folder: Path, config: Config) -> None:
    with pytest.raises(ContractError, match="holds another run") as caught:
        check_inputs(config)
    assert caught.value.where == "training.output_dir"


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.req("RUN-01", "MET-03")
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077], indirect=True, ids=oct)
def test_every_file_of_a_run_and_of_a_made_model_has_the_mode_of_the_umask(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, umask: int
) -> None:
    tuner = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 2}
    training = {"max_steps": 1, "save_steps": 1}
    for name, own in (("full", {}), ("lora", {"tuner": tuner})):
        made = small_config(toy_checkpoint, toy_data, tmp_path / name, training=training, **own)
        run(made)
    make_model(tmp_path / "model", 0, tie=True)
    paths = list(tmp_path.rglob("*"))
    assert {path.suffix for path in paths} >= {".safetensors", ".pt", ".html", ".jsonl", ".yaml"}
    modes = {str(path): oct(path.stat().st_mode & 0o777) for path in paths}
    wanted = {str(path): oct((0o777 if path.is_dir() else 0o666) & ~umask) for path in paths}
    assert modes == wanted
