"""Linear attention in a packed row: no state of a segment reaches the next one.

The layers of linear attention of Qwen3.5 have a causal convolution and a recurrence, which run
along a whole row. Position ids do not stop them. Kernels for GPUs take the bounds of segments.
transformers' own functions in torch do not, so with them each segment has a call of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import is_causal_conv1d_available, is_flash_linear_attention_available


def separate_segments(model: nn.Module, ending: str) -> None:
    """Make each layer of linear attention of `model` keep segments apart, in place.

    ending: of their names, by the family of the model.
    """
    for name, module in model.named_modules():
        if name.endswith(ending):
            kind = type(module)
            module.__class__ = type(kind.__name__, (_Separate, kind), {})


class _Separate(nn.Module):
    """Before the class of a layer: its forward with the bounds and lengths of segments.

    A forward without bounds, such as that of `generate`, is the layer's own.
    """

    def forward(
        self,
        hidden_states: Tensor,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        segment_lengths: Sequence[int] = (),
        **kwargs: Any,
    ) -> Tensor:
        """(1, L, hidden) -> (1, L, hidden).

        segment_lengths: of a pack, on the host. The others are of `packed_bounds`.
        """
        forward = super().forward
        found: Tensor
        if cu_seq_lens_q is None:
            found = forward(hidden_states, **kwargs)
        elif hidden_states.is_cuda and _has_kernels():
            token = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            segment = torch.searchsorted(cu_seq_lens_q[1:], token, out_int32=True, right=True)
            own = {"cu_seq_lens_q": cu_seq_lens_q, "seq_idx": segment[None]}
            found = forward(hidden_states, **kwargs, **own)
        else:
            parts = hidden_states.split(list(segment_lengths), dim=1)
            found = torch.cat([forward(part, **kwargs) for part in parts], dim=1)
        return found


def _has_kernels() -> bool:
    """Return whether transformers finds the kernels (convolution, recurrence) that take bounds."""
    return bool(is_flash_linear_attention_available() and is_causal_conv1d_available())
