"""FLOPs of a step, and the memory that it uses on the device (FULL-09)."""

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

from learner.models.gpus import Gpu, gpu_of_device
from learner.models.packs import IMAGE, Pack
from shared_contracts.checkpoints import GIB

# Forward and backward of attention over forward: backward has 5 products, forward has 2.
_ATTENTION = 3.5


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs of a model, as functions of a pack's rows (Chowdhery et al., "PaLM", appendix B).

    Recomputed activations do not count. A weight costs 2 in forward, 2 for the gradient of its
    input, and 2 for its own gradient if it is trained.

    forward, both: forward alone, and forward with backward. Each has the FLOPs per token of text,
    per supervised row of the head, per patch, per image token in the tower's mergers, and per
    square of a segment's tokens, of a frame's patches and of a window's patches.
    """

    forward: tuple[float, ...]
    both: tuple[float, ...]

    @classmethod
    def of(cls, model: nn.Module, config: Any) -> "Arithmetic":
        forward = dict.fromkeys(("text", "head", "vision", "merged"), 0.0)
        both = dict(forward)
        tuned = any(w.requires_grad for name, w in model.named_parameters() if "visual" in name)
        text, vision = config.get_text_config(), config.vision_config
        for name, used, weight in _products(model, text):
            kind = "text"
            if "lm_head" in name:
                kind = "head"
            elif "visual" in name:
                kind = "merged" if "merger" in name else "vision"
            passed = kind in ("text", "head") or (tuned and not name.endswith("patch_embed.proj"))
            forward[kind] += 2 * used
            both[kind] += 2 * used * (1 + passed + weight.requires_grad)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        linear = _linear_attention(text)
        forward["text"] += linear
        both["text"] += 3 * linear
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        causal = 2.0 * text.num_attention_heads * width * kinds.count("full_attention")
        layer, backward = 4.0 * vision.hidden_size, _ATTENTION if tuned else 1
        full = len(getattr(vision, "fullatt_block_indexes", range(vision.depth)))
        frames, windows = layer * full, layer * (vision.depth - full)
        return cls(
            (*forward.values(), causal, frames, windows),
            (*both.values(), _ATTENTION * causal, backward * frames, backward * windows),
        )

    def of_pack(self, pack: Pack, head_rows: int) -> tuple[float, float]:
        """Return the FLOPs of one forward of a pack, alone and with its backward."""
        patches = frames = windows = 0.0
        if pack.patches is not None:
            of_frames, of_windows = pack.patches.frames.on_host, pack.patches.windows
            patches, frames = float(of_frames[-1]), _squares(of_frames)
            windows = 0.0 if of_windows is None else _squares(of_windows.on_host)
        images, squares = float((pack.mm_token_types == IMAGE).sum()), _squares(pack.bounds)
        counts = (len(pack), head_rows, patches, images, squares, frames, windows)
        return sum(map(mul, self.forward, counts)), sum(map(mul, self.both, counts))


def _squares(bounds: Tensor) -> float:
    return float(bounds.diff().double().square().sum())


def _products(model: nn.Module, text: Any) -> Iterator[tuple[str, float, Tensor]]:
    """Yield (name of the module, multiplied elements per row, weight) of each product."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            yield name, module.weight.numel(), module.weight
        elif name.endswith((".mlp.experts", ".mlp.gate")):  # of a mixture of experts
            for weight in module.parameters(recurse=False):
                used = text.num_experts_per_tok / text.num_experts if weight.ndim == 3 else 1
                yield name, used * weight.numel(), weight


def _linear_attention(text: Any) -> float:
    """Return the FLOPs per token of all linear attention layers in forward, without projections.

    Products of a chunk of 64 tokens with keys, values and the state, and the convolution (Yang et
    al., "Gated Delta Networks", arXiv 2412.06464, section 3.3).
    """
    layers = (getattr(text, "layer_types", None) or []).count("linear_attention")
    if not layers:
        return 0.0
    keys, values = text.linear_key_head_dim, text.linear_value_head_dim
    heads, chunk = text.linear_num_value_heads, 64
    rule = heads * (chunk * (2 * keys + values) + 3 * keys * values)
    width = 2 * keys * text.linear_num_key_heads + values * heads
    return float(2 * layers * (rule + width * text.linear_conv_kernel_dim))


class DeviceUse:
    """The peak memory of each step, and the data sheet of the device; None for an unknown one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gpu: Gpu | None = None
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self.gpu = gpu_of_device(found.name, found.total_memory)

    def begin(self) -> None:
        """Reset the peak before a step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_gib(self) -> float:
        """Return the peak of tensors since `begin` on a GPU; else that of the process so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / GIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
