"""Models whose output head or patch embedding is of an unknown shape: refused without weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.gpus import gpu_named
from learner.models.load import load_model, on_meta
from learner.operate.estimate.report import estimate
from shared_contracts.errors import ContractError
from tests.unit.small_run import small_config

Change = Callable[[Any], None]


def without_head(model: Any) -> None:
    del model.lm_head


def biased_head(model: Any) -> None:
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features)


def several_layers(model: Any) -> None:
    model.lm_head = nn.Sequential(model.lm_head)


def half_of_the_vocabulary(model: Any) -> None:
    head = model.lm_head
    model.lm_head = nn.Linear(head.in_features, head.out_features // 2, bias=False)


def flat_patches(model: Any) -> None:
    model.model.visual.patch_embed.proj = nn.Linear(8, 8)


def padded_patches(model: Any) -> None:
    model.model.visual.patch_embed.proj.padding = (0, 1, 1)


def other_name(model: Any) -> None:
    patches = model.model.visual.patch_embed
    patches.projection = patches.proj
    del patches.proj


@contextmanager
def registered(change: Change) -> Iterator[None]:
    """Within the block transformers makes models of another class for a Qwen3-VL."""

    class Changed(Qwen3VLForConditionalGeneration):
        def __init__(self, config: Qwen3VLConfig) -> None:
            super().__init__(config)  # type: ignore[no-untyped-call]
            change(self)

    Changed.config_class = Qwen3VLConfig
    AutoModelForImageTextToText.register(Qwen3VLConfig, Changed, exist_ok=True)
    try:
        yield
    finally:
        del AutoModelForImageTextToText._model_mapping._extra_content[Qwen3VLConfig]


@pytest.fixture
def config(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Config:
    """Of a run whose checkpoint has no weights: reading them would be another error."""
    folder = tmp_path / "described"
    folder.mkdir()
    for file in toy_checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
    return small_config(folder, toy_data, tmp_path / "run")


@pytest.mark.req("FULL-02", "FULL-04")
@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param(change, found, id=change.__name__)
        for change, found in [
            (without_head, "it has no lm_head"),
            (biased_head, r"its lm_head is Linear.*no linear layer without a bias"),
            (several_layers, r"its lm_head is Sequential"),
            (half_of_the_vocabulary, r"a weight of 671 x \d+, and its config says"),
            (flat_patches, r"patch_embed\.proj is Linear.*, and no Conv3d"),
            (padded_patches, r"patch_embed\.proj is Conv3d.*overlap or are padded"),
            (other_name, "its vision tower has no patch_embed"),
        ]
    ],
)
def test_a_model_of_unknown_parts_is_refused_before_weights_are_read(
    config: Config, toy_data: ToyData, change: Change, found: str
) -> None:
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)
    with registered(change):
        for start in (
            lambda: load_model(config),
            lambda: estimate(config, samples, gpu_named("H100"), 1),
        ):
            with pytest.raises(ContractError, match=found) as refused:
                start()
            assert (refused.value.where, refused.value.do) == (
                "model.model",
                "Use a model of the Qwen-VL family",
            )
    assert on_meta(config)
    with pytest.raises(ContractError, match="cannot be loaded"):
        load_model(config)
