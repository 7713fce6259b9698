"""Parameters that a worker receives beside its model: a trial's, or a LoRA adapter (SYNC-01).

vLLM's own way to an adapter is a path. It loads from there only what its manager does not
hold, so an adapter that was put into the manager under the id of `SERVED` is never looked
for on a disk. There is room for one, nothing can push it out, and it is there from before
the first request: a sequence that waits in the engine while weights change needs no other
name afterwards.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config.lora import LoRAConfig
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

from rollout_server.engines.verification import Box, RawPart
from rollout_server.engines.vllm.load_plan import Placement, Plan, Target
from rollout_server.engines.vllm.read_back import Asked, subtotals
from shared_contracts.digests import matrix_shape
from shared_contracts.weights import AdapterMeta, ParameterMeta


class StagingModel(nn.Module):
    """Takes what a transfer engine would load into the model.

    tensors: what came, by name, on the CPU and in memory of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name] = tensor.detach().to("cpu", copy=True)  # buckets are used again


@dataclass
class Staged:
    """Parameters that come, or came, beside the model."""

    parameters: Sequence[ParameterMeta]
    model: StagingModel = field(default_factory=StagingModel, kw_only=True)

    def subtotals(self, asked: Sequence[tuple[str, Sequence[int] | None]]) -> list[list[RawPart]]:
        """Of what came, each parameter as one part (`read_back.subtotals`)."""
        by_name = {parameter.name: parameter for parameter in self.parameters}
        held, plan = nn.Module(), Plan()
        for index, (name, tensor) in enumerate(self.model.tensors.items()):
            held.register_parameter(str(index), nn.Parameter(tensor, requires_grad=False))
            rows, columns = matrix_shape(tensor.shape)
            box = Box(0, 0, rows, columns)
            target = Target("", str(index), rows, columns)
            plan.placements[name].append(Placement(box, target, box))
        return subtotals(held, plan, [Asked(by_name[n], c) for n, c in asked])


SERVED = LoRARequest(lora_name="weights", lora_int_id=1, lora_path="in-memory")

Halves = list[Tensor | None]


@dataclass
class Arriving(Staged):
    """An adapter that is being pushed, or was."""

    meta: AdapterMeta

    def read_back(
        self, slot: "AdapterSlot", asked: Sequence[tuple[str, Sequence[int] | None]]
    ) -> list[list[RawPart]]:
        """Subtotals of what came.

        Raises RuntimeError where the engine's layers do not hold exactly that.
        """
        if wrong := slot.differences(self.meta, self.model.tensors):
            raise RuntimeError(f"these layers hold another adapter: {', '.join(wrong)}")
        return self.subtotals(asked)


class AdapterSlot:
    """lora: of the worker's model runner. manager: which has the adapter's layers."""

    def __init__(self, lora: WorkerLoRAManager, manager: LoRAModelManager) -> None:
        self._lora = lora
        self._manager = manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        self._mapper = None if mapper is None else mapper.get_rename_mapper()

    @property
    def _config(self) -> LoRAConfig:
        return self._lora.lora_config

    def faults(self, meta: AdapterMeta, parameters: Sequence[ParameterMeta]) -> list[str]:
        """Why this engine cannot serve an adapter of these parameters; empty when it can."""
        try:
            _peft(meta).validate_legal(self._config)
        except ValueError as error:
            return [str(error)]
        sites = self._sites()
        halves: dict[str, list[bool]] = {}
        found = []
        for parameter in parameters:
            try:
                module, is_a = parse_fine_tuned_lora_name(parameter.name, self._mapper)
            except ValueError:
                found.append(f"{parameter.name} is no A or B of a LoRA layer")
                continue
            if module not in sites:
                found.append(f"{parameter.name}: the engine has no LoRA layer there")
                continue
            inputs, outputs = sites[module]
            expected = [meta.r, inputs] if is_a else [outputs, meta.r]
            if parameter.shape != expected:
                found.append(f"{parameter.name} is {parameter.shape}, not {expected}")
            halves.setdefault(module, []).append(is_a)
        wrong = [name for name, of in halves.items() if sorted(of) != [False, True]]
        return found + [f"{name} has not one A and one B" for name in wrong]

    def fill(self, meta: AdapterMeta, tensors: Mapping[str, Tensor]) -> None:
        """Make an adapter that `faults` found none in the one that is served."""
        adapter = LoRAModel.from_lora_tensors(
            SERVED.lora_int_id,
            {name: tensor.clone() for name, tensor in tensors.items()},  # B is scaled in place
            _peft(meta),
            device="cpu",
            dtype=self._dtype,
            weights_mapper=self._mapper,
        )
        self._manager.remove_adapter(adapter.id)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(adapter.id)

    def clear(self) -> None:
        """Serve the model's own weights alone."""
        self._manager.remove_adapter(SERVED.lora_int_id)
        self._lora.add_dummy_lora(SERVED, rank=1)
        self._manager.activate_adapter(SERVED.lora_int_id)

    def differences(self, meta: AdapterMeta, tensors: Mapping[str, Tensor]) -> list[str]:
        """The engine's layers that hold anything but A and scaled B of this adapter."""
        halves: dict[tuple[str, bool], Tensor] = {}
        for name, tensor in tensors.items():
            module, is_a = parse_fine_tuned_lora_name(name, self._mapper)
            half = tensor.to("cpu", self._dtype)
            halves[module, is_a] = half if is_a else half * _peft(meta).vllm_lora_scaling_factor
        return [
            name
            for name, (layer, parts) in self._layers().items()
            if not _holds(
                layer, *[[halves.get((p, is_a)) for p in parts] for is_a in (True, False)]
            )
        ]

    @property
    def _dtype(self) -> torch.dtype:
        dtype = self._config.lora_dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _sites(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each module of a checkpoint that can be adapted."""
        return {
            part: (int(layer.base_layer.input_size), outputs)
            for layer, parts in self._layers().values()
            for part, outputs in zip(parts, _outputs(layer), strict=True)
        }

    def _layers(self) -> dict[str, tuple[BaseLinearLayerWithLoRA, list[str]]]:
        """Layers that can be adapted, by module, with the checkpoint's modules in each."""
        found = {}
        for name, layer in self._manager.modules.items():
            parts = self._manager.packed_modules.get(name, [name])
            if isinstance(layer, BaseLinearLayerWithLoRA) and layer.n_slices == len(parts):
                found[name] = layer, parts
        return found


def _peft(meta: AdapterMeta) -> PEFTHelper:
    return PEFTHelper.from_dict(meta.model_dump())


def _outputs(layer: BaseLinearLayerWithLoRA) -> list[int]:
    """Outputs of each slice of a layer, over all workers."""
    base = layer.base_layer
    if isinstance(base, QKVParallelLinear):
        values = base.total_num_kv_heads * base.v_head_size
        keys, queries = (
            n * base.head_size for n in (base.total_num_kv_heads, base.total_num_heads)
        )
        sizes = [queries, keys, values]
    elif isinstance(base, MergedColumnParallelLinear):
        sizes = list(base.output_sizes)
    else:
        sizes = [base.output_size]
    return sizes if layer.n_slices == len(sizes) else [sum(sizes)]


def _holds(layer: BaseLinearLayerWithLoRA, a: Halves, b: Halves) -> bool:
    """Whether each slice of the layer's slot has these halves, and zeros around them."""
    if layer.tp_size > 1:
        a, b = _shards(layer.slice_lora_a, a), _shards(layer.slice_lora_b, b)
    held = zip((*layer.lora_a_stacked, *layer.lora_b_stacked), (*a, *b), strict=True)
    return all(_is_padded(slot[0, 0], half) for slot, half in held)


def _shards(slice_lora: Callable[[Any], Any], halves: Halves) -> Halves:
    """What one worker of several holds; vLLM slices a packed layer's halves as a list."""
    if len(halves) > 1:
        return list(slice_lora(halves))
    return [None if half is None else slice_lora(half) for half in halves]


def _is_padded(slot: Tensor, half: Tensor | None) -> bool:
    expected = torch.zeros_like(slot)
    if half is not None:
        expected[: half.shape[0], : half.shape[1]] = half.to(slot.device)
    return torch.equal(slot, expected)
