"""Loading checkpoints: errors, and how experts lie in a file.

transformers tells in five types what a checkpoint folder lacks.

The published checkpoints of Qwen3-VL with experts have the matrices of experts transposed, and
engines read them so. transformers' own conversion transposes only where shapes differ from those of
the model. It does so when it loads, but never when it saves. The one that is registered here loads
both forms and saves the published one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

from shared_contracts.errors import ContractError

_OF_THE_FOLDER = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)


@contextmanager
def loading(where: str, what: str, fix: str) -> Iterator[None]:
    """Raise ContractError for what cannot be loaded in the block.

    where: what a person named; what: is loaded; fix: what to do.
    """
    try:
        yield
    except _OF_THE_FOLDER as error:
        raise ContractError(where, f"{what} cannot be loaded ({error})", fix) from error


class _TransposedInFiles(Transpose):
    """Transposes a matrix that is not as the model has it, and every one that is saved."""

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
