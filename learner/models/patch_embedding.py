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


def use_product(model: nn.Module, ending: str | None) -> None:
    """Put a `PatchProduct` in the place of each patch embedding of `model`.

    ending: of their names, by the family of the model; None: the family has none.

    Raises ContractError as `check_patch_embedding` does.
    """
    for name, module in _patch_embeddings(model, ending):
        if not isinstance(module, PatchProduct):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _product(module))


def check_patch_embedding(model: nn.Module, ending: str | None) -> None:
    """Each patch embedding of `model` can be a `PatchProduct`; arguments as of `use_product`.

    Raises ContractError for a model without one, for one that is no convolution, and for one
    whose patches overlap or are padded.
    """
    _patch_embeddings(model, ending)


def _patch_embeddings(model: nn.Module, ending: str | None) -> list[tuple[str, nn.Conv3d]]:
    """By name."""
    if ending is None:
        return []
    named = [each for each in model.named_modules() if each[0].endswith(ending)]
    if not named:
        raise _refused(f"its vision tower has no {ending}")
    return [(name, _checked(name, module)) for name, module in named]


def _checked(name: str, module: nn.Module) -> nn.Conv3d:
    if not isinstance(module, nn.Conv3d):
        raise _refused(f"its patch embedding {name} is {module}, and no Conv3d")
    plain = module.stride == module.kernel_size and module.groups == 1
    if not plain or any(module.padding) or any(size != 1 for size in module.dilation):
        found = f"its patch embedding {name} is {module}, whose patches overlap or are padded"
        raise _refused(found)
    return module


def _refused(found: str) -> ContractError:
    return ContractError("model.model", found, "Use a model of the Qwen-VL family")


def _product(conv: nn.Conv3d) -> PatchProduct:
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
