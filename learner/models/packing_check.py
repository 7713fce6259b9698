"""A check of the loaded model: segments of a packed row do not affect each other (PACK-04)."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from learner.models.head import whole_model
from learner.models.packed_forward import packed_forward
from learner.models.packs import IMAGE, make_pack, make_segment
from learner.models.prompts import EncodedPrompt
from learner.types import Role, Target
from shared_contracts.errors import ContractError


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Change text and image of the first of two segments, and compare the second one's logits.

    Raises ContractError if they differ: the attention does not separate segments.
    """
    was_training = model.training
    model.eval()
    moved = (_second_of_two(model, 1) - _second_of_two(model, 2)).abs().max().item()
    model.train(was_training)
    if math.isnan(moved):
        raise ContractError(
            "model.model",
            "the model's logits are NaN for a picture of one token and 7 tokens of text",
            "Give a checkpoint whose weights are finite; or set model.torch_dtype to float32, if "
            "they are too large for bfloat16",
        )
    if moved > 1e-3:
        raise ContractError(
            "training.packing",
            f"packed segments affect each other with this model and attention (logits differ by "
            f"{moved:.3g})",
            "Set model.attn_implementation to auto or sdpa, or training.packing to false",
        )


def _second_of_two(model: nn.Module, first: int) -> Tensor:
    """Return the logits (L, V) of the second of two segments in a row.

    first: value of the first segment's pixels and tokens. A segment has an image of one token and
    7 tokens of text.
    """
    whole = whole_model(model)
    inner: Any = whole.model
    tower, patch = inner.visual, inner.visual.patch_embed
    side = tower.spatial_merge_size
    values = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
    image, types = torch.tensor([inner.config.image_token_id]), torch.tensor([IMAGE])
    grid = torch.tensor([[1, side, side]])
    segments = []
    for scale, text in ((first, [first] * 7), (1, list(range(2, 9)))):
        pixels = torch.full((side * side, values), float(scale))
        target = Target(text, 0, [], np.full(7, Role.CLOSURE, dtype=np.int8), [])
        prompt = EncodedPrompt(image, types, pixels, grid)
        segments.append(make_segment(inner, "packing check", prompt, target, False))
    pack = make_pack(segments).to(next(model.parameters()).device)
    return packed_forward(model, pack, lambda given: given.head(given.hidden[8:]))
