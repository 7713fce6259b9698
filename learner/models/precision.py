"""Mixed precision (FULL-03): trained weights are float32, the forward computes in `torch_dtype`.

Accelerate's mixed precision would keep 16-bit copies of all weights during a forward, and make a
float32 copy of every output. Losses, norms and sums are float32: autocast keeps those of the model,
`learner.objectives` has its own.
"""

from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

DType = Literal["float32", "bfloat16"]


def compute_in(model: nn.Module, dtype: DType) -> None:
    """Run forward and backward of `model` in `dtype`; outputs are not converted.

    Call it before DDP or FSDP2 wraps the model. A weight is used once in a forward, so autocast's
    cache of 16-bit copies would save no time and take 2 bytes per parameter.
    """
    if dtype == "bfloat16":
        device = next(model.parameters()).device.type
        in_bfloat16 = torch.autocast(device, torch.bfloat16, cache_enabled=False)
        model.forward = in_bfloat16(model.forward)


def sharded_policy(dtype: DType) -> MixedPrecisionPolicy:
    """Return a policy by which FSDP2 gathers weights in `dtype` and sums gradients in float32."""
    if dtype == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
