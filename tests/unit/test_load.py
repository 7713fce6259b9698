"""What is trained, and in which types."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from learner.config import parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.models.load import load_model
from learner.models.packed_forward import PromptEncoder
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.small_run import small_mapping

EXIF_ORIENTATION = 0x0112
TURNED_RIGHT = 6


def config_of(model: Path, data: ToyData, out: Path, tuner: dict[str, object]) -> Config:
    mapping = small_mapping(model, data, out)
    mapping["model"]["torch_dtype"] = "bfloat16"
    mapping["tuner"] = tuner
    return parse_config(mapping)


def test_full_tuning_trains_float32_weights_whatever_it_computes_in(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    loaded = load_model(config_of(toy_checkpoint, toy_data, tmp_path, {"train_type": "full"}))
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_lora_keeps_frozen_weights_small_and_trains_float32_adapters(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    tuner = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
    loaded = load_model(config_of(toy_checkpoint, toy_data, tmp_path, tuner))
    types = {(p.requires_grad, p.dtype) for p in loaded.model.parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}


@pytest.mark.req("ROLL-01")
def test_a_photo_is_turned_upright_as_its_camera_says(toy_checkpoint: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (64, 96, 3)).astype(np.uint8)
    sideways, upright = tmp_path / "sideways.png", tmp_path / "upright.png"
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = TURNED_RIGHT
    Image.fromarray(pixels).save(sideways, exif=exif)
    Image.fromarray(np.rot90(pixels, -1)).save(upright)
    encode = PromptEncoder(AutoProcessor.from_pretrained(toy_checkpoint), "Detect.", None)
    first, second = (
        encode(Sample(path.name, (path,), 64, 96, ())).pixel_values for path in (sideways, upright)
    )
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


@pytest.mark.parametrize("content", [b"", b"no image", None], ids=["empty", "text", "gone"])
def test_an_image_that_cannot_be_decoded_is_told_with_its_line(
    toy_checkpoint: Path, tmp_path: Path, content: bytes | None
) -> None:
    image = tmp_path / "broken.png"
    if content is not None:
        image.write_bytes(content)
    encode = PromptEncoder(AutoProcessor.from_pretrained(toy_checkpoint), "Detect.", None)
    with pytest.raises(ContractError) as caught:
        encode(Sample("train.jsonl:7", (image,), 64, 96, ()))
    assert caught.value.where == "train.jsonl:7"
    assert str(image) in caught.value.found
    assert "learner data check" in caught.value.do
