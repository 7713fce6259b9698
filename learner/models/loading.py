"""Loading checkpoints: errors, and the layout of experts in files.

Published checkpoints of Qwen3-VL with experts have transposed matrices of experts, which engines
expect. transformers' own conversion transposes a matrix of another shape when it loads, but never
when it saves. The conversion that is registered here loads both layouts and saves the published
one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

from shared_contracts.errors import ContractError

# What transformers raises for an incomplete or wrong checkpoint folder.
_OF_THE_FOLDER = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)


@contextmanager
def loading(where: str, what: str, fix: str) -> Iterator[None]:
    """Raise ContractError if loading fails in the block.

    where: config key, option or path; what: name of the loaded thing; fix: what to do.
    """
    try:
        yield
    except _OF_THE_FOLDER as error:
        raise ContractError(where, f"{what} cannot be loaded ({error})", fix) from error


class _TransposedInFiles(Transpose):
    """When loading, transposes matrices of another shape; when saving, all."""

    @property
    def reverse_op(self) -> ConversionOps:
        return Transpose(self.dim1, self.dim0)


register_checkpoint_conversion_mapping(
    "qwen3_vl_moe",
    [
        WeightConverter(name, name, [_TransposedInFiles(1, 2, check_dims=True)])
        for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    ],
    overwrite=True,
)
