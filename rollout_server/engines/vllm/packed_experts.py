"""Experts of vLLM's CPU engine, which multiplies with a packed copy of their weights.

vLLM packs them in place when a layer is loaded for the first time, but not when it is loaded again:
the kernel would then read plain weights as packed ones. So a push makes vLLM set up the kernel of
each layer anew. Packing moves elements within an expert and changes none. So packed numbers tell
where each element is.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_BITS = {2: torch.int16, 4: torch.int32}
# Bits of a number that are packed at once: so few that they are no NaN of any type.
_AT_ONCE = 8


def set_up_anew(model: nn.Module) -> None:
    """Before weights come: make vLLM pack those of experts. Without them no forward is possible."""
    for module in model.modules():
        if _packing(module) is not None:
            method: Any = module.quant_method
            method.moe_kernel = None


def unpacked(module: nn.Module, held: Tensor) -> Tensor:
    """A tensor of a layer, as loaders fill it; weights of experts are (E, rows, columns)."""
    packing = _packing(module)
    if packing is None or held.ndim != 3:
        return held
    order = _order(packing, held.shape[1], held.shape[2], held.dtype)
    found = torch.empty_like(held)
    found.flatten(1)[:, order] = held.flatten(1)
    return found


def _packing(module: nn.Module) -> str | None:
    """The instructions that the weights of a layer are packed for; None where they are not."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return experts.isa if isinstance(experts, CPUUnquantizedExperts) else None


@cache
def _order(packing: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Which element of an expert each packed one is; (rows * columns,)."""
    numbers = torch.arange(rows * columns)
    order = torch.zeros_like(numbers)
    bits = _BITS[dtype.itemsize]
    for shift in range(0, numbers.numel().bit_length(), _AT_ONCE):
        part = (numbers >> shift) & (2**_AT_ONCE - 1)
        plain = part.to(bits).view(dtype).view(1, rows, columns)
        packed = torch.empty_like(plain)
        torch.ops._C.prepack_moe_weight(plain, packed, packing)
        order |= packed.view(bits).flatten().long() << shift
    return order
