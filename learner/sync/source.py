"""Full weights of a model under training, merged on the fly (SYNC-02).

Plain parameters are passed through; the base weight of a LoRA or DoRA layer is merged in
a copy of that one layer, so the training model is never touched and only one layer's
weights exist twice at a time. Tied weights appear once, under their first name. Names are
those of the Hugging Face checkpoint.
"""

import copy
from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from shared_contracts.weights import DTYPE_BYTES, DtypeName, ParameterMeta


class MergedWeights:
    """Iterable of (name, tensor) with the same order in every pass."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model.get_base_model() if isinstance(model, PeftModel) else model

    def metadata(self) -> list[ParameterMeta]:
        """Name, dtype and shape of what iteration yields, without merging anything."""
        return [
            ParameterMeta(name=name, dtype=_dtype_name(weight), shape=list(weight.shape))
            for name, weight, _ in self._entries()
        ]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight, layer in self._entries():
            yield name, weight.detach() if layer is None else _merged_weight(layer)

    def _entries(self) -> Iterator[tuple[str, Tensor, LoraLayer | None]]:
        """(checkpoint name, parameter, its LoRA layer when it has to be merged)."""
        for name, weight in self._model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if ".lora_" in f".{name}":
                continue
            plain = name.replace(".base_layer.", ".")
            layer: LoraLayer | None = None
            if leaf == "weight" and owner.endswith(".base_layer"):
                found = self._model.get_submodule(owner.removesuffix(".base_layer"))
                assert isinstance(found, LoraLayer)
                layer = found
            yield plain, weight, layer


def _merged_weight(layer: LoraLayer) -> Tensor:
    merged = copy.deepcopy(layer)
    merged.merge()
    weight = merged.get_base_layer().weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _dtype_name(tensor: Tensor) -> DtypeName:
    """`torch.bfloat16` -> `bfloat16`."""
    name = str(tensor.dtype).removeprefix("torch.")
    for known in DTYPE_BYTES:
        if known == name:
            return known
    raise AssertionError(f"no checkpoint holds {name}")
