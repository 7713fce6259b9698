"""A checkpoint or a tuner that cannot be loaded is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from learner.config.schema import Config, LoraTuner
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


def test_a_model_of_another_family_is_refused_with_the_known_ones(config: Config) -> None:
    (config.model.model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ContractError, match=r"its model_type is llama.*qwen3_vl") as caught:
        load_model(config)
    assert caught.value.where == "model.model"


@pytest.mark.parametrize("spoil", [without_weights, torn, without_processor])
def test_an_incomplete_checkpoint_is_refused(config: Config, spoil: Callable[[Path], None]) -> None:
    spoil(config.model.model)
    with pytest.raises(ContractError, match="cannot be loaded") as caught:
        load_model(config)
    assert caught.value.where == "model.model"
    assert str(config.model.model) in caught.value.found


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
