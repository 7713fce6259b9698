"""Proof on the loaded model that segments of a packed row cannot see each other (PACK-04)."""

from typing import Any

import torch
from torch import Tensor, nn

from learner.models.attention import packed_bounds
from learner.models.families import Family, vision_inputs
from learner.models.families.qwen_vl import QWEN_VL
from learner.models.packed_forward import inner_of, known_on_host
from learner.models.packs import IMAGE
from learner.models.patches import SmallestImage, pack_patches
from shared_contracts.errors import ContractError


@torch.no_grad()
def check_packing(model: nn.Module, family: Family = QWEN_VL) -> None:
    """Prove that segments of a packed row cannot see each other (PACK-04).

    Changes the text and the image of the first of two segments and asks whether the second one's
    logits move.

    Raises:
        ContractError: they do; the attention implementation does not separate segments.
    """
    was_training = model.training
    model.eval()
    moved = (_second_of_two(model, family, 1) - _second_of_two(model, family, 2)).abs().max().item()
    model.train(was_training)
    if not moved <= 1e-3:  # also where it is no number
        raise ContractError(
            "training.packing",
            f"packed segments see each other with this model and attention (logits move by "
            f"{moved:.3g})",
            "Set model.attn_implementation to auto or sdpa, or training.packing to false",
        )


def _second_of_two(model: nn.Module, family: Family, first: int) -> Tensor:
    """Logits (L, V) of the second of two segments in a row, whose first one follows `first`."""
    device = next(model.parameters()).device
    ids = [torch.full((8,), first), torch.arange(1, 9)]
    types = torch.zeros(8, dtype=torch.long)
    positions = family.text_positions(8)
    bounds = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    arguments: dict[str, Any] = packed_bounds(bounds, 8)
    patches, grids = None, None
    inner = inner_of(model, family)
    if inner is not None and (image := family.smallest_image(inner)) is not None:
        types[0] = IMAGE
        for own in ids:
            own[0] = image.token
        grid = image.image_grid_thw
        positions = family.positions(inner, ids[0], types, grid)
        if (known := family.patches(inner, grid)) is not None:
            patches = pack_patches([known, known]).to(device)
        grids = grid.repeat(2, 1) if patches is not None else grid.repeat(2, 1).to(device)
        pixels = torch.cat([first * image.pixel_values, image.pixel_values]).to(device)
        images = SmallestImage(image.token, pixels, grids)
        arguments |= vision_inputs(family, images, types.repeat(2)[None].to(device))
    with known_on_host(model, family, bounds, patches, grids):
        output = model(
            input_ids=torch.cat(ids)[None].to(device),
            position_ids=family.position_ids(positions.repeat(1, 2)).to(device),
            **arguments,
            attention_mask=None,
            use_cache=False,
        )
    logits: Tensor = output.logits[0, 8:]
    return logits
