"""The tensors of a push, with the names of the checkpoint and the engines' type (SYNC-01).

The model in training does not change. Tied weights appear once, under their first name. Experts,
which transformers fuses, are sent one by one: engines load them so for every family.
"""

import copy
import logging
import threading
from collections import deque
from collections.abc import Iterator
from typing import Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared_contracts.errors import ContractError, RunError
from shared_contracts.weights import (
    ADAPTER_KEY,
    AdapterMeta,
    DtypeName,
    ParameterMeta,
    unfused,
    wire_dtype,
)

_LOG = logging.getLogger(__name__)

# Layers of peft whose base weight is merged.
Adapted = LoraLayer | TrainableTokensLayer


class MergedWeights:
    """All weights of a model, LoRA and DoRA merged layer by layer, in a copy (SYNC-02)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model.get_base_model() if isinstance(model, PeftModel) else model

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        """Return name, type and shape of each of `tensors`, without making them."""
        return [
            ParameterMeta(name=name, dtype=wire_dtype(name, dtype), shape=shape)
            for fused, weight, _ in self._entries()
            for name, shape in unfused(fused, weight.shape)
        ]

    @torch.no_grad()
    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, weight); without merge and cast it is the model's own tensor."""
        for name, weight, layer in self._entries():
            merged = weight.detach() if layer is None else _merged_weight(layer)
            yield from _experts_apart(name, _cast(name, merged, dtype))

    def stream(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """Yield what `tensors` does, in a push by all processes at the same time."""
        return self.tensors(dtype)

    def _entries(self) -> Iterator[tuple[str, Tensor, Adapted | None]]:
        """Yield (checkpoint name, parameter, its adapted layer if it must be merged)."""
        for name, weight in self._model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if ".lora_" in f".{name}" or ".trainable_tokens_" in name:
                continue
            plain = name.replace(".token_adapter.", ".").replace(".base_layer.", ".")
            layer: Adapted | None = None
            if leaf == "weight" and owner.endswith(".base_layer"):
                found = self._model.get_submodule(owner.removesuffix(".base_layer"))
                assert isinstance(found, Adapted)
                layer = found
            yield plain, weight, layer


class GatheredWeights(MergedWeights):
    """All weights of a sharded model (FSDP2).

    `tensors` yields the weights of the last `gather`, from memory of the host and in the type of
    the servers. It gathers nothing: process 0 can push to a restarted server while the other
    processes generate or train, and a broken push leaves no process in a collective.

    sends: this process keeps the weights; the others help to gather them.
    """

    def __init__(self, model: nn.Module, *, sends: bool) -> None:
        super().__init__(model)
        self._sends = sends
        self._whole: dict[str, Tensor] = {}

    def gather(self, dtype: DtypeName) -> None:
        """Gather every parameter; all processes call it at the same time."""
        deque(self.stream(dtype), maxlen=0)

    def stream(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, weight) while they are gathered; each step is a collective.

        Each shard is cast before it travels. On the device of the model one parameter is whole at
        a time. A host tensor of the last call is written to again.
        """
        for name, weight, _ in self._entries():
            whole = _cast(name, weight.detach(), dtype)
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            if self._sends:
                self._keep(name, whole)
            yield from _experts_apart(name, whole)

    def _keep(self, name: str, whole: Tensor) -> None:
        if (kept := self._whole.get(name)) is None or kept.dtype != whole.dtype:
            kept = self._whole[name] = torch.empty_like(whole, device="cpu")
        kept.copy_(whole)

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, weight), valid until the next `gather`."""
        assert self._whole, "`gather` comes before a push, which another process makes"
        for name, weight in self._whole.items():
            yield from _experts_apart(name, _cast(name, weight, dtype))


def _cast(name: str, weight: Tensor, dtype: DtypeName) -> Tensor:
    return weight.to(getattr(torch, wire_dtype(name, dtype)))


def _experts_apart(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split the fused weights of experts into views, one for each matrix (`unfused`)."""
    parts = unfused(name, weight.shape)
    if parts[0][0] == name:
        yield name, weight
        return
    rows, columns = parts[0][1]
    for (part, _), matrix in zip(parts, weight.reshape(-1, rows, columns), strict=True):
        yield part, matrix


def _merged_weight(layer: Adapted) -> Tensor:
    if isinstance(layer, TrainableTokensLayer):
        return layer.get_merged_weights(layer.active_adapters).detach()
    merged = copy.deepcopy(layer)
    merged.merge()
    weight = merged.get_base_layer().weight
    assert isinstance(weight, Tensor)
    return weight.detach()


class AdapterWeights:
    """The trained adapter alone, for engines that have the base weights.

    `learner.models.load` makes one adapter, of one rank and scaling, and trains nothing else but
    rows of coordinate tokens (`SyncMode.of`).
    """

    def __init__(self, model: PeftModel) -> None:
        self._model = model
        self._name = model.active_adapters[0]

    @property
    def adapter(self) -> AdapterMeta:
        config = self._model.peft_config[self._name]
        assert isinstance(config, LoraConfig)
        return AdapterMeta(
            r=config.r,
            lora_alpha=config.lora_alpha,
            target_modules=sorted({name.split(".")[-3] for name in self._state()}),
            use_dora=config.use_dora,
            use_rslora=config.use_rslora,
        )

    def safetensors(self, dtype: DtypeName) -> bytes:
        """Return the file of the adapter, with the names of peft's own, in `dtype`."""
        tensors = {
            name: tensor.detach().to(getattr(torch, dtype)).contiguous()
            for name, tensor in self._state().items()
        }
        return save(tensors, metadata={ADAPTER_KEY: self.adapter.model_dump_json()})

    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = get_peft_model_state_dict(
            self._model, adapter_name=self._name, save_embedding_layers=False
        )
        return state


MODE = "rollout_matching.vllm.sync.mode"
FALLBACK = "rollout_matching.vllm.sync.fallback_to_full"


class SyncMode:
    """Which weights the pushes to all servers of a run send.

    Starts with `adapter` if there is one. After the first failed push of it, all further pushes
    send `full`. Methods may be called from several threads.

    fallback_to_full: false: `adapter_failed` raises instead.
    fallback: the failure, with its type, since which full weights are sent; None without one.
    """

    def __init__(
        self, full: MergedWeights, adapter: AdapterWeights | None, fallback_to_full: bool
    ) -> None:
        self.full = full
        self.fallback: str | None = None
        self._adapter = adapter
        self._fallback_to_full = fallback_to_full
        self._lock = threading.Lock()

    @classmethod
    def of(
        cls, model: nn.Module, mode: Literal["full", "adapter"], fallback_to_full: bool
    ) -> "SyncMode":
        """Return the mode of the pushes of a model in training.

        An adapter that is not all that is trained counts as a failed push from the start.
        Raises ContractError for `adapter` without one.
        """
        if mode == "full":
            return cls(MergedWeights(model), None, fallback_to_full)
        if not isinstance(model, PeftModel):
            raise ContractError(
                MODE,
                "is adapter, and the model is trained without an adapter",
                "Use full, or train with tuner.train_type: lora",
            )
        chosen = cls(MergedWeights(model), AdapterWeights(model), fallback_to_full)
        if any(".trainable_tokens_" in name for name, _ in model.named_parameters()):
            found = "rows of coordinate tokens are trained, too (tuner.train_coordinate_rows), "
            found += "and engines accept them only with full weights"
            chosen.adapter_failed(RunError(found))
        return chosen

    @property
    def adapter(self) -> AdapterWeights | None:
        """The adapter, if it is what is sent now."""
        return None if self.fallback else self._adapter

    def state(self) -> tuple[str, str | None]:
        """Return what is sent now, `full` or `adapter`, and the `fallback`."""
        return "full" if self.adapter is None else "adapter", self.fallback

    def adapter_failed(self, error: Exception) -> None:
        """Send full weights from now on. Raises ContractError if `fallback_to_full` is false."""
        failure = f"{type(error).__name__}: {error}"
        if not self._fallback_to_full:
            raise ContractError(
                MODE,
                f"the adapter cannot be pushed, and {FALLBACK} is false: {failure}",
                f"Remove the cause, set {MODE} to full, or {FALLBACK} to true",
            ) from error
        with self._lock:
            if self.fallback is None:
                self.fallback = failure
                _LOG.warning(
                    "the adapter cannot be pushed, so full weights are pushed: %s", failure
                )
