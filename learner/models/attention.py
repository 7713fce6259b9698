"""Attention in a packed row: each token attends to the earlier tokens of its own segment.

    Pack.bounds  --> packed_bounds --> packed_attention   text, causal
    Pack.patches --> image_bounds  --> image_attention    all patches of an image, or in some
                                                          layers of a window

    CUDA: torch's varlen_attn, one kernel for all segments
    else: a padded batch, or one call for each segment

Both functions are registered with transformers, as `PACKED` and `PACKED_IMAGES`. They cost the sum
of the squares of the segments' lengths and need no mask (FULL-01); transformers' own `sdpa` builds
a mask of L x L. A forward without bounds, such as that of `generate`, is transformers' `sdpa`.

transformers would read the bounds of text from the positions on the device, and the host would wait
for it. `without_search` and `image_bounds` pass the bounds that the host has.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
from learner.objectives import numerics
from shared_contracts.errors import ContractError

PACKED = "rollmatch_packed"
PACKED_IMAGES = "rollmatch_packed_images"

# A batch is padded to at most this many times the tokens of its segments; above it, each segment
# has a call of its own.
_PADDED = 1.25


@dataclass(frozen=True)
class Runs:
    """Runs of patches that attend to each other.

    bounds: (runs + 1,) int32, the start of each run, and the end. on_host: a copy that stays on the
    host. longest: patches of the longest run.
    """

    bounds: Tensor
    on_host: Tensor
    longest: int

    @classmethod
    def of(cls, bounds: Tensor) -> "Runs":
        return cls(bounds, bounds, int(bounds.diff().max()))

    def to(self, device: torch.device) -> "Runs":
        return Runs(self.bounds.to(device), self.on_host, self.longest)


@dataclass(frozen=True)
class Patches:
    """The patches of all images of a pack: inputs of a vision tower that follow from their grids.

    They are computed on the host when packs are made. A tower would compute them on the device, and
    the host would wait for it, in some models in every layer.

    rows: arguments of the vision tower, with one row per patch.
    frames: the runs of frames.
    window_index: (tokens,), an order of merged patches in which each window is a run.
    windows: these runs, for layers that attend within windows. Both are None if no layer does.
    """

    rows: Mapping[str, Tensor]
    frames: Runs
    window_index: Tensor | None = None
    windows: Runs | None = None

    def to(self, device: torch.device) -> "Patches":
        return Patches(
            {name: row.to(device) for name, row in self.rows.items()},
            self.frames.to(device),
            None if self.window_index is None else self.window_index.to(device),
            None if self.windows is None else self.windows.to(device),
        )


def attention_of(choice: AttentionChoice) -> str | dict[str, str]:
    """Return transformers' `attn_implementation`; raises ContractError if it is not installed."""
    installed = {
        "flash_attention_2": is_flash_attn_2_available,
        "flash_attention_3": is_flash_attn_3_available,
    }
    if choice in installed and not installed[choice]():
        raise ContractError(
            "model.attn_implementation",
            f"{choice} is not installed here, or supports no GPU of this machine",
            "Install its package, or use auto, which needs none",
        )
    if choice == "auto":
        return {"text_config": PACKED, "vision_config": PACKED_IMAGES}
    return choice


def packed_bounds(bounds: Tensor, longest: int) -> dict[str, Any]:
    """Return the arguments of a packed forward, by the names of transformers' flash attention.

    bounds: as of a `Pack`. longest: tokens of the longest segment.
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
    """Attend causally within segments; (1, heads, L, width) each -> (1, L, heads, width).

    key, value: may have fewer heads than the query (grouped-query attention).
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
    windows: Runs | None = None,
    windowed: Collection[nn.Module] = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend among the patches of each image; (1, heads, N, width) -> (1, N, heads, width).

    patch_bounds, longest_image, windows, windowed: of `image_bounds`.
    """
    if patch_bounds is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    assert longest_image is not None
    if windows is not None and module in windowed:
        patch_bounds, longest_image = windows.bounds, windows.longest
    return _within(patch_bounds, longest_image, False, query, key, value, scaling), None


def _within(
    starts: Tensor,
    longest: int,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
) -> Tensor:
    """Attend within segments; (1, heads, L, width) each -> (1, L, heads, width).

    starts: (segments + 1,) int32. longest: tokens of the longest segment.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # rotary embeddings leave queries and keys in float32
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # (L, heads, width) each
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if numerics.is_on_cuda(query):
        window = (-1, 0) if causal else (-1, -1)
        same = (starts, starts, longest, longest)
        output = varlen_attn(q, k, v, *same, scale=scaling, window_size=window, enable_gqa=True)
        assert isinstance(output, Tensor)
        return output[None]
    lengths = starts.diff().tolist()
    one_length = len(set(lengths)) == 1
    if one_length or (causal and len(lengths) * longest <= _PADDED * len(q)):
        return _padded(q, k, v, lengths, scaling, causal)[None]
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    outputs = [_attend(a[None], b[None], c[None], scaling, causal)[0] for a, b, c in parts]
    return torch.cat(outputs)[None]


def _padded(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scaling: float | None, causal: bool
) -> Tensor:
    """Attend within segments by one batch; (L, heads, width) each -> (L, heads, width).

    causal: no token attends to the padding behind it. Else all `lengths` must be equal.
    """

    def batch(tensor: Tensor) -> Tensor:
        if len(set(lengths)) == 1:
            return tensor.reshape(len(lengths), -1, *tensor.shape[1:])
        return pad_sequence(list(tensor.split(lengths)), batch_first=True)

    output = _attend(batch(q), batch(k), batch(v), scaling, causal)
    return torch.cat([row[:length] for row, length in zip(output, lengths, strict=True)])


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, causal: bool) -> Tensor:
    """Attend within rows; (batch, L, heads, width) each -> (batch, L, heads, width)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    output = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2)


def without_search(text_config: Any, bounds: Tensor) -> dict[str, Any]:
    """Return arguments of a forward with `packed_bounds` that stop transformers' search.

    Without a mask, transformers searches the positions for segments, and the host waits for the
    result. It passes a mask of four dimensions on unchanged, and `packed_attention` ignores it.
    """
    if text_config._attn_implementation != PACKED:
        return {}
    return {"attention_mask": bounds.new_ones((1, 1, 1, 1), dtype=torch.bool)}


def image_bounds(
    vision_config: Any, patches: Patches, windowed: Collection[nn.Module] = ()
) -> dict[str, Any]:
    """Return the arguments of a tower that attends within frames; `windowed` within windows."""
    chosen = vision_config._attn_implementation
    frames, windows = patches.frames, patches.windows
    if chosen == PACKED_IMAGES:  # for transformers, all patches are one image: one call
        whole = frames.on_host[[0, -1]]
        arguments = {
            "cu_seqlens": whole,
            "patch_bounds": frames.bounds,
            "longest_image": frames.longest,
        }
        if windows is not None:
            arguments |= {"cu_window_seqlens": whole, "windows": windows, "windowed": windowed}
    elif "flash" in chosen:
        arguments = {"cu_seqlens": frames.bounds, "max_seqlen": frames.longest}
        if windows is not None:
            arguments |= {"cu_window_seqlens": windows.bounds, "max_window_seqlen": windows.longest}
    else:
        arguments = {"cu_seqlens": frames.on_host}
        if windows is not None:
            arguments |= {"cu_window_seqlens": windows.on_host}
    return arguments if windows is None else arguments | {"window_index": patches.window_index}


def _mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return no mask for a forward of whole rows, such as a packed one; else that of `sdpa`."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs
    )


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(PACKED_IMAGES, image_attention)
for _name in (PACKED, PACKED_IMAGES):
    AttentionMaskInterface.register(_name, _mask)
