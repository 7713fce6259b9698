"""The LoRA adapter of a model under training, as peft would save it (SYNC-01)."""

from collections.abc import Iterator

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor

from learner.sync.source import BaseWeights
from shared_contracts.errors import RunError
from shared_contracts.weights import AdapterMeta, DtypeName, ParameterMeta


class AdapterWeights:
    """What is trained, for engines that have all other weights already.

    Every property and method raises RunError where the adapter says not all that training
    changed, or not how it is to be scaled.
    """

    def __init__(self, model: PeftModel) -> None:
        self._model = model

    @property
    def adapter(self) -> AdapterMeta:
        name, config = self._one()
        layers = [layer for layer in self._model.modules() if isinstance(layer, LoraLayer)]
        shapes = {(layer.r[name], layer.scaling[name]) for layer in layers}
        if len(shapes) > 1:
            raise RunError(f"the adapter's layers have several (rank, scaling): {sorted(shapes)}")
        return AdapterMeta(
            r=config.r,
            lora_alpha=config.lora_alpha,
            target_modules=sorted({name.split(".")[-3] for name in self._state()}),
            use_dora=config.use_dora,
            use_rslora=config.use_rslora,
        )

    @property
    def base(self) -> BaseWeights:
        """What the engines must have: the model's weights without the adapter."""
        return BaseWeights(self._model)

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        """Name, type and shape of each tensor of the adapter."""
        return [
            ParameterMeta(name=name, dtype=dtype, shape=list(tensor.shape))
            for name, tensor in self._state().items()
        ]

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """(name as in peft's files, tensor); one that needs no cast is the model's."""
        for name, tensor in self._state().items():
            yield name, tensor.detach().to(getattr(torch, dtype))

    def _state(self) -> dict[str, Tensor]:
        name, _ = self._one()
        state: dict[str, Tensor] = get_peft_model_state_dict(
            self._model, adapter_name=name, save_embedding_layers=False
        )
        return state

    def _one(self) -> tuple[str, LoraConfig]:
        """The adapter that is trained, which must be all that is."""
        active = self._model.active_adapters
        if len(active) != 1:
            raise RunError(f"adapters {active} are active, and one can be pushed")
        config = self._model.peft_config[active[0]]
        if not isinstance(config, LoraConfig):
            raise RunError(f"the adapter is of peft type {config.peft_type}, not LoRA")
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and ".lora_" not in name:
                raise RunError(f"{name} is trained beside the adapter")
        return active[0], config
