"""`load_model`: which parameters are trained, in which types. Images of a prompt."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from learner.config import parse_config
from learner.data.toy import ToyData
from learner.models.load import load_model
from learner.models.prompts import PromptEncoder
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.small_run import small_mapping

EXIF_ORIENTATION = 0x0112
TURNED_RIGHT = 6


LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
TRAINED, FROZEN = (True, torch.float32), (False, torch.bfloat16)


@pytest.mark.parametrize(
    ("tuner", "types"), [({"train_type": "full"}, {TRAINED}), (LORA, {TRAINED, FROZEN})]
)
def test_trained_weights_are_float32_and_frozen_ones_have_the_configured_type(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, tuner: object, types: object
) -> None:
    mapping = small_mapping(toy_checkpoint, toy_data, tmp_path)
    mapping["model"]["torch_dtype"] = "bfloat16"
    mapping["tuner"] = tuner
    model = load_model(parse_config(mapping)).model
    assert {(p.requires_grad, p.dtype) for p in model.parameters()} == types


@pytest.mark.req("ROLL-01")
def test_a_photo_is_turned_upright_by_its_exif_orientation(
    toy_checkpoint: Path, tmp_path: Path
) -> None:
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


def test_an_undecodable_image_is_reported_with_its_sample(
    toy_checkpoint: Path, tmp_path: Path
) -> None:
    image = tmp_path / "broken.png"
    image.write_bytes(b"no image")
    encode = PromptEncoder(AutoProcessor.from_pretrained(toy_checkpoint), "Detect.", None)
    with pytest.raises(ContractError, match=r"train\.jsonl:7") as caught:
        encode(Sample("train.jsonl:7", (image,), 64, 96, ()))
    assert str(image) in caught.value.found
