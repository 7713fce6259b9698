"""Full weights of a model under training, merged on the fly (SYNC-02).

Plain parameters are passed through; the base weight of a LoRA or DoRA layer is merged in
a copy of that one layer, so the training model is never touched and only one layer's
weights exist twice at a time. Tied weights appear once, under their first name. Names are
those of the Hugging Face checkpoint; the type is the one the engines hold.
"""

import copy
from collections.abc import Iterator
from typing import Protocol

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared_contracts.weights import AdapterMeta, DtypeName, ParameterMeta


class Weights(Protocol):
    """Named tensors; the same order in `metadata` and in every pass of `tensors`."""

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        """Name, type and shape of what `tensors` yields, without making any of it."""

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """(name, detached tensor of `dtype`), one after another."""


class WeightSource(Weights, Protocol):
    """What one push sends.

    adapter: of a source that yields an adapter's tensors instead of full weights.
    base: the weights that the adapter is over.
    """

    @property
    def adapter(self) -> AdapterMeta | None: ...

    @property
    def base(self) -> Weights | None: ...


class SourceChoice(Protocol):
    """Which weights a push sends; one choice may serve pushes to several servers at once."""

    def current(self) -> WeightSource:
        """What to send now."""

    def failed(self, source: WeightSource, error: Exception) -> bool:
        """Told that a push of `source` failed; true: push what is `current` then instead."""


class OneSource:
    """Always the same weights; a push that failed is not tried with others."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def current(self) -> WeightSource:
        return self._source

    def failed(self, source: WeightSource, error: Exception) -> bool:
        return False


class BaseWeights:
    """All weights of a model but its adapters, as they were before those."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model.get_base_model() if isinstance(model, PeftModel) else model

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        """Name, type and shape of what `tensors` yields, without making any of it."""
        return [
            ParameterMeta(name=name, dtype=dtype, shape=list(weight.shape))
            for name, weight, _ in self._entries()
        ]

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, weight); a weight that needs no cast is the model's."""
        for name, weight, _ in self._entries():
            yield name, weight.detach().to(getattr(torch, dtype))

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


class MergedWeights(BaseWeights):
    """All weights of a model, LoRA and DoRA merged."""

    adapter = None
    base = None

    @torch.no_grad()
    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, weight); a weight that needs neither merge nor cast is the model's."""
        for name, weight, layer in self._entries():
            merged = weight.detach() if layer is None else _merged_weight(layer)
            yield name, merged.to(getattr(torch, dtype))


class GatheredWeights(BaseWeights):
    """All weights of a model of which every process holds shards (FSDP2).

    What is sent are the weights at the last `gather`, in memory of the host.

    sends: this process keeps them, to send them; the others help to gather them.
    """

    adapter = None
    base = None

    def __init__(self, model: nn.Module, *, sends: bool) -> None:
        super().__init__(model)
        self._sends = sends
        self._whole: dict[str, Tensor] = {}

    @torch.no_grad()
    def gather(self) -> None:
        """Put every parameter together, one after another; all processes at the same time."""
        for name, weight, _ in self._entries():
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()
            if self._sends:
                self._whole[name] = whole.to("cpu", copy=True)

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, weight); one that needs no cast is kept until the next `gather`."""
        assert self._whole, "`gather` comes before a push, which another process makes"
        for name, weight in self._whole.items():
            yield name, weight.to(getattr(torch, dtype))


def _merged_weight(layer: LoraLayer) -> Tensor:
    merged = copy.deepcopy(layer)
    merged.merge()
    weight = merged.get_base_layer().weight
    assert isinstance(weight, Tensor)
    return weight.detach()
