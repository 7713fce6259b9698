"""The patch embedding of a vision tower, as a product of matrices (FULL-04).

Its convolution has a stride as large as its kernel, so each patch is one row of a product. On a
CPU the convolution takes seven times as long, and on GPUs without a kernel for its shape longer
still.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from shared_contracts.errors import ContractError


class PatchProduct(nn.Conv3d):
    """A convolution of patches that are as large as its kernel, with the same parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """(patches, channels, frames, height, width) -> (patches, out, 1, 1, 1)."""
        found = linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return found[:, :, None, None, None]


def use_product(model: nn.Module) -> None:
    """Put a `PatchProduct` in the place of each patch embedding of `model`.

    Raises ContractError for one whose patches overlap or are padded.
    """
    for name, module in list(model.named_modules()):
        if name.endswith("patch_embed.proj") and type(module) is nn.Conv3d:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _product(name, module))


def _product(name: str, conv: nn.Conv3d) -> PatchProduct:
    plain = conv.stride == conv.kernel_size and conv.groups == 1
    if not plain or any(conv.padding) or any(size != 1 for size in conv.dilation):
        raise ContractError(
            "model.model",
            f"its patch embedding {name} is {conv}, whose patches overlap or are padded",
            "Use a model of the Qwen-VL family",
        )
    with torch.device("meta"):
        made = PatchProduct(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,  # type: ignore[arg-type]  # three numbers
            conv.stride,  # type: ignore[arg-type]
            bias=conv.bias is not None,
        )
    made.weight, made.bias = conv.weight, conv.bias
    return made.train(conv.training)
