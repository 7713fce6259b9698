"""Attention in a packed row: each token sees the tokens of its own segment that come before it.

    Pack.bounds --> cu_seq_lens_q --> packed_attention
                                        CUDA: torch's varlen_attn, one kernel for all segments
                                        else: a padded batch, or one call for each segment

The function is registered with transformers under `PACKED`. It costs the sum of the squares of
the segments' lengths and needs no mask (FULL-01); transformers' own `sdpa` builds a mask of
L x L. A forward without bounds, such as that of `generate`, is transformers' `sdpa`.

The vision tower calls its attention once for each image, so it has no packed row: `sdpa` serves it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from learner.config.schema import AttentionChoice
from learner.objectives.numerics import counts_as_cuda
from shared_contracts.errors import ContractError

PACKED = "rollmatch_packed"

# Most tokens of a padded batch, over those of its segments: beyond it, segments go one by one.
_PADDED = 1.25


def attention_of(choice: AttentionChoice) -> str | dict[str, str]:
    """What transformers is told for `model.attn_implementation`.

    Raises ContractError for a kind of flash attention that is not installed.
    """
    installed = {
        "flash_attention_2": is_flash_attn_2_available,
        "flash_attention_3": is_flash_attn_3_available,
    }
    if choice in installed and not installed[choice]():
        raise ContractError(
            "model.attn_implementation",
            f"{choice} is not installed here, or finds no GPU that it supports",
            "Install its package, or use auto, which needs none",
        )
    if choice == "auto":
        return {"text_config": PACKED, "vision_config": "sdpa"}
    return choice


def packed_bounds(bounds: Tensor, longest: int) -> dict[str, Any]:
    """Arguments of a packed forward, by the names that transformers' flash attention has.

    bounds: (segments + 1,) int32, where each segment starts, and the end of the row.
    longest: tokens of the longest segment.
    """
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within segments; (1, heads, L, width) each -> (1, L, heads, width).

    key, value: may have fewer heads, each of which serves several of the query's.
    cu_seq_lens_q, max_length_q: of `packed_bounds`.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    assert max_length_q is not None
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # rotary embeddings leave queries and keys in float32
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # (L, heads, width) each
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if kind == "cuda" or counts_as_cuda():
        bounds, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
        causal = (-1, 0)
        found = varlen_attn(
            q, k, v, *bounds, *longest, scale=scaling, window_size=causal, enable_gqa=True
        )
        assert isinstance(found, Tensor)
        return found[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    if len(lengths) * max_length_q <= _PADDED * len(q):
        return _padded(q, k, v, lengths, scaling)[None], None
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    alone = [_causal(a[None], b[None], c[None], scaling)[0] for a, b, c in parts]
    return torch.cat(alone)[None], None


def _padded(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scaling: float | None) -> Tensor:
    """(L, heads, width) each -> the same, by one batch: no token sees the padding behind it."""

    def batch(tensor: Tensor) -> Tensor:
        if len(set(lengths)) == 1:
            return tensor.reshape(len(lengths), -1, *tensor.shape[1:])
        return pad_sequence(list(tensor.split(lengths)), batch_first=True)

    found = _causal(batch(q), batch(k), batch(v), scaling)
    return torch.cat([row[:length] for row, length in zip(found, lengths, strict=True)])


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """(batch, L, heads, width) each -> (batch, L, heads, width)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2)


def _mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None where all of a row is attended to at once, as in a packed one; else that of `sdpa`."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs
    )


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _mask)
