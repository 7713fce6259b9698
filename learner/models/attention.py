"""Attention in a packed row: each token sees the tokens of its own segment that come before it.

    Pack.bounds  --> packed_bounds --> packed_attention   text, causal
    Pack.patches --> image_bounds  --> image_attention    the patches of an image see each other, or
                                                          in some layers those of a window
                                         CUDA: torch's varlen_attn, one kernel for all segments
                                         else: a padded batch, or one call for each segment

Both functions are registered with transformers, as `PACKED` and `PACKED_IMAGES`. They cost the sum
of the squares of the segments' lengths and need no mask (FULL-01); transformers' own `sdpa` builds
a mask of L x L. A forward without bounds, such as that of `generate`, is transformers' `sdpa`.

transformers would learn the bounds from tensors of the device, for which the host has to wait: of
images in every layer of the vision tower, of text from the positions. `without_search` and
`image_bounds` say what is known on the host already.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

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
from learner.models.patches import Patches, Runs
from learner.objectives.numerics import counts_as_cuda
from shared_contracts.errors import ContractError

PACKED = "rollmatch_packed"
PACKED_IMAGES = "rollmatch_packed_images"

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
        return {"text_config": PACKED, "vision_config": PACKED_IMAGES}
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
    return _within(cu_seq_lens_q, max_length_q, True, query, key, value, scaling), None


def image_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    patch_bounds: Tensor | None = None,
    longest_image: int | None = None,
    windowed: "Windowed | None" = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention among the patches of each image; (1, heads, N, width) -> (1, N, heads, width).

    patch_bounds, longest_image, windowed: of `image_bounds`.
    """
    if patch_bounds is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    assert longest_image is not None
    if windowed is not None and module in windowed.layers:
        patch_bounds, longest_image = windowed.windows.bounds, windowed.windows.longest
    return _within(patch_bounds, longest_image, False, query, key, value, scaling), None


class Windowed(NamedTuple):
    """The attention of layers that attend within windows, and the windows of a pack."""

    layers: Collection[nn.Module]
    windows: Runs


def _within(
    starts: Tensor,
    longest: int,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
) -> Tensor:
    """Attention within segments; (1, heads, L, width) each -> (1, L, heads, width).

    starts: (segments + 1,) int32. longest: tokens of the longest segment.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # rotary embeddings leave queries and keys in float32
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # (L, heads, width) each
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if kind == "cuda" or counts_as_cuda():
        window = (-1, 0) if causal else (-1, -1)
        same = (starts, starts, longest, longest)
        found = varlen_attn(q, k, v, *same, scale=scaling, window_size=window, enable_gqa=True)
        assert isinstance(found, Tensor)
        return found[None]
    lengths = starts.diff().tolist()
    one_length = len(set(lengths)) == 1
    if one_length or (causal and len(lengths) * longest <= _PADDED * len(q)):
        return _padded(q, k, v, lengths, scaling, causal)[None]
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    alone = [_attend(a[None], b[None], c[None], scaling, causal)[0] for a, b, c in parts]
    return torch.cat(alone)[None]


def _padded(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scaling: float | None, causal: bool
) -> Tensor:
    """(L, heads, width) each -> the same, by one batch.

    causal: no token sees the padding behind it. Else all `lengths` are equal.
    """

    def batch(tensor: Tensor) -> Tensor:
        if len(set(lengths)) == 1:
            return tensor.reshape(len(lengths), -1, *tensor.shape[1:])
        return pad_sequence(list(tensor.split(lengths)), batch_first=True)

    found = _attend(batch(q), batch(k), batch(v), scaling, causal)
    return torch.cat([row[:length] for row, length in zip(found, lengths, strict=True)])


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, causal: bool) -> Tensor:
    """(batch, L, heads, width) each -> (batch, L, heads, width)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    found = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2)


def without_search(text_config: Any, bounds: Tensor) -> dict[str, Any]:
    """Arguments of a forward with `packed_bounds`, so that transformers reads no positions.

    Without a mask, transformers looks in the positions for segments, and the host waits for what it
    finds. It takes a mask of four dimensions as it is, and `packed_attention` needs none.
    """
    if text_config._attn_implementation != PACKED:
        return {}
    return {"attention_mask": bounds.new_ones((1, 1, 1, 1), dtype=torch.bool)}


def image_bounds(
    vision_config: Any, patches: Patches, windowed: Collection[nn.Module] = ()
) -> dict[str, Any]:
    """Arguments of a vision tower whose layers attend within frames of the row of patches.

    windowed: the attention of the layers that attend within windows.
    """
    chosen = vision_config._attn_implementation
    frames, windows = patches.frames, patches.windows
    if chosen == PACKED_IMAGES:  # for transformers, all patches are one image: one call
        whole = frames.on_host[[0, -1]]
        found = {
            "cu_seqlens": whole,
            "patch_bounds": frames.bounds,
            "longest_image": frames.longest,
        }
        if windows is not None:
            found |= {"cu_window_seqlens": whole, "windowed": Windowed(windowed, windows)}
    elif "flash" in chosen:
        found = {"cu_seqlens": frames.bounds, "max_seqlen": frames.longest}
        if windows is not None:
            found |= {"cu_window_seqlens": windows.bounds, "max_window_seqlen": windows.longest}
    else:
        found = {"cu_seqlens": frames.on_host}
        if windows is not None:
            found |= {"cu_window_seqlens": windows.on_host}
    return found if windows is None else found | {"window_index": patches.window_index}


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
AttentionInterface.register(PACKED_IMAGES, image_attention)
for _name in (PACKED, PACKED_IMAGES):
    AttentionMaskInterface.register(_name, _mask)
