"""Pushes after the first one: the copies of a plan, without vLLM's loaders (SYNC-03).

    replay = Replay(model, model_config, plan)   once vLLM's loaders have loaded the manifest
    replay.begin()                               whether the plan still holds
    replay.load_weights(...)                     for each bucket
    replay.finish()

vLLM's layerwise reload gives a layer tensors in the form that loaders fill, lets the layer process
them, and copies the result into the tensors that the engine computes with. A layer that processes
nothing gets each piece where the engine computes with it. Any other layer waits for all its pieces;
then vLLM's reload runs for this layer, with the copies of the plan in place of the loaders.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from rollout_server.engines.verification import Box
from rollout_server.engines.vllm.load_plan import Constant, Placement, Plan, Target
from shared_contracts.digests import matrix_shape

# Processing of these methods changes nothing on the devices below; meta: a GPU is rehearsed.
_UNPROCESSED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_UNPROCESSED_ON = ("cuda", "meta")


@dataclass
class _Layer:
    """A module of the model, and what a push has brought for it.

    held: the module's parameters, and the addresses of their memory. expected: pieces of a push.
    """

    module: nn.Module
    held: dict[str, tuple[nn.Parameter, int]] = field(default_factory=dict)
    constants: list[tuple[Target, Constant]] = field(default_factory=list)
    expected: int = 0
    pieces: list[tuple[Placement, Tensor]] = field(default_factory=list)

    def is_unchanged(self) -> bool:
        parameters = dict(self.module.named_parameters(recurse=False, remove_duplicate=False))
        return all(
            parameters.get(leaf) is parameter and parameter.data_ptr() == address
            for leaf, (parameter, address) in self.held.items()
        )

    def processes(self) -> bool:
        """Whether the engine computes with anything but the tensors that loaders fill."""
        method = getattr(self.module, "quant_method", None)
        devices = {parameter.device.type for parameter, _ in self.held.values()}
        plain = type(method) in _UNPROCESSED and devices <= set(_UNPROCESSED_ON)
        forms, _ = get_layerwise_info(self.module).restore_metadata
        return (isinstance(method, QuantizeMethodBase) and not plain) or any(
            leaf in forms and _form(forms[leaf]) != _form(parameter)
            for leaf, (parameter, _) in self.held.items()
        )


@dataclass
class _Copy:
    """into: the box of the placement, where the engine computes with it; None: the layer waits."""

    layer: _Layer
    placement: Placement
    into: Tensor | None = None


class Replay(nn.Module):
    """Takes what a transfer engine would load into a model.

    model: at rest. plan: has no faults, and vLLM's loaders were the last to load its manifest:
    they have padded what is filled in place.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig, plan: Plan) -> None:
        super().__init__()
        self._model_config = model_config
        self._copies: dict[str, list[_Copy]] = {}
        self._arrived: set[str] = set()
        # In lists, so no submodules: vLLM's reload of this module is none of theirs.
        self._layers = self._planned(model, plan)
        self._attention = [m for m in model.modules() if is_deferred_attention_layer(m)]
        filled = [layer.module for layer in self._layers]
        heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
        self._tied_heads = [head for head in heads if head not in filled]
        self._is_whole = not plan.besides and not any(m in self._attention for m in filled)

    def _planned(self, model: nn.Module, plan: Plan) -> list[_Layer]:
        layers: dict[str, _Layer] = {}
        for name, placements in plan.placements.items():
            copies = self._copies[name] = []
            filled = set()
            for placement in placements:
                target = placement.target
                module = model.get_submodule(target.name)
                parameter = module.get_parameter(target.tensor)
                if (place := (id(parameter), placement.box)) in filled:
                    continue  # it is tied, so the engine holds it once
                filled.add(place)
                layer = layers.setdefault(target.name, _Layer(module))
                layer.held[target.tensor] = (parameter, parameter.data_ptr())
                layer.expected += 1
                copies.append(_Copy(layer, placement))
        for target, constants in plan.constants.items():
            if target.name in layers:
                layers[target.name].constants += [(target, each) for each in constants]
        for copies in self._copies.values():
            for copy in copies:
                if not copy.layer.processes():
                    parameter, _ = copy.layer.held[copy.placement.target.tensor]
                    copy.into = _box(parameter, copy.placement.target, copy.placement.box)
        return list(layers.values())

    def begin(self) -> bool:
        """Begin a push, where the plan holds.

        It does not where the loaders do more than the plan says, or where the model has other
        tensors than before.
        """
        self._arrived.clear()
        return self._is_whole and all(layer.is_unchanged() for layer in self._layers)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy parameters of the manifest, in any order and number; raises KeyError for others."""
        for name, tensor in weights:
            matrix = tensor.reshape(matrix_shape(tensor.shape))
            for copy in self._copies[name]:
                piece = _part(matrix, copy.placement.source)
                if copy.into is not None:
                    copy.into.copy_(piece)
                else:
                    self._keep(copy, piece)
            self._arrived.add(name)

    def _keep(self, copy: _Copy, piece: Tensor) -> None:
        layer = copy.layer
        layer.pieces.append((copy.placement, piece))
        if len(layer.pieces) == layer.expected:
            self._refill(layer)
            layer.pieces.clear()

    def _refill(self, layer: _Layer) -> None:
        """Fill, process and put to use; where that fails, the layer keeps what it had."""
        module = layer.module
        info = get_layerwise_info(module)
        initialize_layerwise_reload(module)
        try:
            materialize_layer(module, info)
            for target, constant in layer.constants:
                parameter = module.get_parameter(target.tensor)
                _box(parameter, target, constant.box).fill_(constant.value)
            for placement, piece in layer.pieces:
                parameter = module.get_parameter(placement.target.tensor)
                if piece.is_cuda:  # it came on the stream of another bucket
                    piece.record_stream(torch.cuda.current_stream(piece.device))
                _box(parameter, placement.target, placement.box).copy_(piece)
            # vLLM processes at the end what its loaders have filled in part.
            info.load_numel, info.load_numel_total = 1, 2
            finalize_layerwise_reload(module, self._model_config)
        except BaseException:
            info.load_numel = 0
            finalize_layerwise_reload(module, self._model_config)
            raise

    @torch.no_grad()
    def finish(self) -> None:
        """What vLLM does after all layers. Raises RuntimeError when a parameter did not come."""
        if missing := self._copies.keys() - self._arrived:
            raise RuntimeError(f"{min(missing)} did not come ({len(missing)} did not)")
        for layer in self._attention:
            process: Any = layer.process_weights_after_loading
            process(self._model_config.dtype)
        for head in self._tied_heads:
            process = head.quant_method.process_weights_after_loading
            process(head)


def _form(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _box(parameter: Tensor, target: Target, box: Box) -> Tensor:
    return _part(parameter.data.view(target.rows, target.columns), box)


def _part(matrix: Tensor, box: Box) -> Tensor:
    if box.shape == matrix.shape:
        return matrix
    return matrix[box.row : box.row_end, box.column : box.column_end]
