"""A checkpoint or a tuner that cannot be loaded is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.config.schema import Config, LoraTuner
from learner.data.lengths import image_rule
from learner.data.toy import ToyData
from learner.models.load import load_model
from shared_contracts.errors import ContractError
from tests.unit.small_run import small_config


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def torn(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def without_processor(folder: Path) -> None:
    for file in folder.glob("*processor*"):
        file.unlink()


@pytest.fixture
def config(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Config:
    copy = shutil.copytree(toy_checkpoint, tmp_path / "model")
    return small_config(copy, toy_data, tmp_path / "run")


@pytest.mark.req("FAM-01")
def test_a_model_of_another_family_is_refused_with_the_known_ones(config: Config) -> None:
    (config.model.model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for read in (lambda: load_model(config), lambda: image_rule(config.model.model)):
        with pytest.raises(ContractError, match=r"model_type is llama.*Use one of qwen2_vl, qwen2"):
            read()


@pytest.mark.parametrize("spoil", [without_weights, torn, without_processor])
def test_an_incomplete_checkpoint_is_refused(config: Config, spoil: Callable[[Path], None]) -> None:
    spoil(config.model.model)
    with pytest.raises(ContractError, match="cannot be loaded") as caught:
        load_model(config)
    assert caught.value.where == "model.model"
    assert str(config.model.model) in caught.value.found


def untied_above(folder: Path) -> None:
    """What reads `text_config` alone takes the head for a tied one."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    assert config["text_config"]["tie_word_embeddings"]
    file.write_text(json.dumps({**config, "tie_word_embeddings": False}))


def other_tensors(folder: Path) -> None:
    """Every kind of fault: four are missing, one is unknown, one has another shape."""
    file = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if not k.endswith("mlp.down_proj.weight")}
    changed = {"model.language_model.norm.weight": torch.ones(3), "model.extra": torch.ones(1)}
    save_file({**kept, **changed}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (untied_above, ["1 in no file, first lm_head.weight"]),
        (
            other_tensors,
            [
                "4 in no file, first model.language_model.layers.0.mlp.down_proj.weight, ",
                "1 not of the model, first model.extra",
                "1 of another shape, first model.language_model.norm.weight [3], not [128]",
            ],
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(
    config: Config, spoil: Callable[[Path], None], found: list[str]
) -> None:
    load_model(config)
    spoil(config.model.model)
    with pytest.raises(ContractError, match="do not fit its config") as caught:
        load_model(config)
    assert caught.value.where == "model.model"
    assert str(config.model.model) in caught.value.found
    for each in found:
        assert each in caught.value.found
    assert "layers.3" not in caught.value.found


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        (["q_porj"], "the model has no module q_porj"),
        (["q_proj", "v_porj"], "the model has no module v_porj"),
        (["language_model"], "peft cannot adapt them"),
    ],
)
def test_unknown_target_modules_are_refused(config: Config, modules: list[str], found: str) -> None:
    tuner = LoraTuner(train_type="lora", lora_rank=2, lora_alpha=2, target_modules=modules)
    with pytest.raises(ContractError, match=found) as caught:
        load_model(config.model_copy(update={"tuner": tuner}))
    assert caught.value.where == "tuner.target_modules"
