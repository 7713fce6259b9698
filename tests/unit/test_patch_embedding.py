"""The patch embedding as a product of matrices: equal to the convolution, same parameters."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from learner.data.toy import ToyData
from learner.models.patch_embedding import PatchProduct, use_product
from tests.unit.loaded_models import load_small

pytestmark = pytest.mark.req("FULL-04")

NAME = "patch_embed.proj"


def plain(checkpoint: Path) -> Qwen3VLForConditionalGeneration:
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_convolution(
    toy_checkpoint: Path, dtype: torch.dtype
) -> None:
    conv = plain(toy_checkpoint).model.visual.patch_embed.to(dtype)
    product = copy.deepcopy(conv)
    holder = nn.Module()
    holder.patch_embed = product
    use_product(holder, NAME)
    assert isinstance(product.proj, PatchProduct)
    patches = torch.randn(50, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted, found = conv(patches), product(patches)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(found, wanted, atol=close, rtol=close)
    wanted.square().sum().backward()
    found.square().sum().backward()
    for ours, theirs in zip(product.parameters(), conv.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= close * theirs.grad.norm()


def test_a_loaded_model_has_it_and_keeps_the_names_of_its_weights(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    model = load_small(toy_checkpoint, toy_data, tmp_path).model
    assert model.state_dict().keys() == plain(toy_checkpoint).state_dict().keys()
    own = [name for name, module in model.named_modules() if isinstance(module, PatchProduct)]
    assert own == ["model.visual.patch_embed.proj"]
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
