"""Mixed precision of a run (FULL-03): what is trained stays float32, the forward is `torch_dtype`.

Accelerate's own would keep 16-bit copies of all weights during a forward, and make a float32 copy
of every tensor that a forward returns. Losses, norms and sums stay float32: autocast does those of
the model, `learner.objectives` its own.
"""

from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

DType = Literal["float32", "bfloat16"]


def compute_in(model: nn.Module, dtype: DType) -> None:
    """Run every forward of `model` in `dtype`, and its backward as well.

    Before DDP or FSDP2 wraps it. What the forward returns keeps its type.

    A weight is used once in a forward, so autocast's cache of 16-bit copies would save nothing. It
    would take 2 bytes for each parameter until the end of the forward.
    """
    if dtype == "bfloat16":
        device = next(model.parameters()).device.type
        in_bfloat16 = torch.autocast(device, torch.bfloat16, cache_enabled=False)
        model.forward = in_bfloat16(model.forward)


def sharded_policy(dtype: DType) -> MixedPrecisionPolicy:
    """FSDP2 gathers weights in `dtype` and sums gradients in float32, as DDP does."""
    if dtype == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
