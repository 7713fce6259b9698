"""The patch embedding of a vision tower, as a matrix product (FULL-04).

Stride and kernel of its convolution are equal, so each patch is one row of a product. The
convolution takes seven times as long on a CPU, and longer on a GPU without a kernel for its shape.
"""

from torch import Tensor, nn
from torch.nn.functional import linear

from learner.models.head import refused


class PatchProduct(nn.Conv3d):
    """A convolution of patches of the kernel's size, with the same parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """(patches, channels, frames, height, width) -> (patches, out, 1, 1, 1)."""
        output = linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return output[:, :, None, None, None]


def use_product(model: nn.Module, ending: str) -> None:
    """Make each patch embedding of `model` a `PatchProduct`, in place.

    ending: suffix of their names. Raises ContractError as `patch_embeddings` does.
    """
    for module in patch_embeddings(model, ending):
        module.__class__ = PatchProduct


def patch_embeddings(model: nn.Module, ending: str) -> list[nn.Conv3d]:
    """Return the patch embeddings of `model`, which can be `PatchProduct`s.

    Raises ContractError if there is none, if one is no convolution, and if its patches overlap or
    are padded.
    """
    named = [each for each in model.named_modules() if each[0].endswith(ending)]
    if not named:
        raise refused(f"its vision tower has no {ending}")
    found = []
    for name, module in named:
        if not isinstance(module, nn.Conv3d):
            raise refused(f"its patch embedding {name} is {module}, and no Conv3d")
        plain = module.stride == module.kernel_size and module.groups == 1
        if not plain or any(module.padding) or any(size != 1 for size in module.dilation):
            raise refused(
                f"its patch embedding {name} is {module}, whose patches overlap or are padded"
            )
        found.append(module)
    return found
