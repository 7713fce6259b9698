"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, the last two also as mixtures of experts.

Positions have four rows: those of the text and the three of multimodal RoPE. Each restarts at every
segment of a packed row. In a forward without mask and cache, the restarts of the text row make
transformers attend within segments. Without the text row, it would attend across segments, without
an error. Layers of linear attention need the bounds of segments (`layers.py`).
"""

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from learner.data.checkpoint import read_json
from shared_contracts.errors import ContractError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from learner.models.attention import Patches
    from learner.models.packs import Pack
    from learner.models.prompts import EncodedPrompt

# Parts of the model with a learning rate each.
Part = Literal["language", "vision", "aligner"]

# Largest ratio of an image's sides that the processor accepts.
MAX_ASPECT = 200

# Defaults of transformers' processor.
_DEFAULT_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


class QwenImageRule(NamedTuple):
    """The number of tokens of an image, by the rule of Qwen's image processor.

    The processor resizes to whole blocks of `patch_size * merge_size` pixels, with about the same
    aspect and a number of pixels within its bounds. Each block becomes one token. The rule is
    repeated here because transformers' processor cannot be imported without torch.

    block: side of one token in pixels. min_pixels, max_pixels: of a resized image.
    """

    block: int
    min_pixels: int
    max_pixels: int
    max_aspect: int = MAX_ASPECT

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "QwenImageRule":
        """Read the rule of a checkpoint; raises ContractError if it has none or another."""
        where, processor = _processor(folder)
        if not str(processor.get("image_processor_type")).startswith("Qwen2VLImageProcessor"):
            raise ContractError(
                str(where),
                f"image_processor_type {processor.get('image_processor_type')}",
                "Use a model of the Qwen-VL family, whose image rule is implemented",
            )
        size = processor.get("size") or _DEFAULT_SIZE
        try:
            return cls(
                processor.get("patch_size", 14) * processor.get("merge_size", 2),
                processor.get("min_pixels") or size["shortest_edge"],
                processor.get("max_pixels") or size["longest_edge"],
            )
        except (KeyError, TypeError) as error:
            do = "Save the processor of the checkpoint again"
            raise ContractError(str(where), f"its sizes cannot be read ({error})", do) from error

    def tokens(self, width: int, height: int) -> int | None:
        """Return the tokens of an image in pixels; None if its sides exceed `MAX_ASPECT`."""
        if max(width, height) / min(width, height) > MAX_ASPECT:
            return None
        block = self.block
        columns, rows = round(width / block), round(height / block)
        if columns * rows * block * block > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            columns = max(1, math.floor(width / shrink / block))
            rows = max(1, math.floor(height / shrink / block))
        elif columns * rows * block * block < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            columns = math.ceil(width * grow / block)
            rows = math.ceil(height * grow / block)
        return columns * rows


def _processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    nested, alone = folder / "processor_config.json", folder / "preprocessor_config.json"
    if nested.is_file() and "image_processor" in (settings := read_json(nested)):
        return nested, settings["image_processor"]
    if not alone.is_file():
        raise ContractError(
            str(folder),
            f"no {nested.name} with an image_processor, and no {alone.name}",
            "Give the folder of a checkpoint saved with its processor",
        )
    return alone, read_json(alone)


class Family:
    """Qwen2-VL, and the base class of the other families.

    placeholder: token of the chat template that stands for an image.
    inputs: arguments of the model beside ids and positions, in the order of `vision_inputs`.
    language_linear: pattern of the linear layers that `target_modules: all-linear` adapts.
    linear_attention: suffix of the names of linear attention layers; None if it has none.
    patch_embedding: suffix of the name of the convolution that `layers.py` replaces.
    """

    placeholder = "<|image_pad|>"
    inputs = ("mm_token_type_ids", "pixel_values", "image_grid_thw")
    language_linear = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    linear_attention: str | None = None
    patch_embedding = "patch_embed.proj"

    def image_rule(self, folder: Path) -> QwenImageRule:
        """Imports no torch."""
        return QwenImageRule.of_checkpoint(folder)

    def part_of(self, name: str) -> Part:
        """The aligner merges patches into language tokens: `merger`, `deepstack_merger_list`."""
        parts = name.split(".")
        if "visual" not in parts:
            return "language"
        return "aligner" if any("merger" in part for part in parts) else "vision"

    def patches(self, inner: Any, grid: "Tensor") -> "Patches":
        """Return the vision tower's inputs that follow from (images, 3) grids on the host.

        Calls the functions of transformers that its towers would call.
        """
        from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

        from learner.models.attention import Patches, Runs

        rows = {"position_ids": get_vision_position_ids(grid, inner.visual.spatial_merge_size)}
        return Patches(rows, Runs.of(get_vision_cu_seqlens(grid)))

    def vision_inputs(
        self, images: "EncodedPrompt | Pack", types: "Tensor"
    ) -> "dict[str, Tensor | None]":
        """Return the arguments of a forward beside ids and positions. types: 1 at image tokens."""
        values = (types, images.pixel_values, images.image_grid_thw)
        return dict(zip(self.inputs, values, strict=True))

    def windowed(self, inner: Any) -> "Collection[nn.Module]":
        """Return the attention modules of the vision tower that attend within windows."""
        return ()

    def positions(
        self, inner: Any, ids: "Tensor", types: "Tensor", grid: "Tensor | None"
    ) -> "Tensor":
        """Return the positions of a segment of L tokens, with images; (L,), (L,) -> (4, L)."""
        import torch

        spatial, _ = inner.get_rope_index(ids[None], types[None], image_grid_thw=grid)
        text = torch.arange(ids.numel(), dtype=ids.dtype)
        return torch.cat([text[None], spatial[:, 0]])


class Qwen25VL(Family):
    """Qwen2.5-VL, most of whose layers attend within windows of an image."""

    def patches(self, inner: Any, grid: "Tensor") -> "Patches":
        from transformers.vision_utils import get_vision_window_index

        from learner.models.attention import Runs

        tower = inner.visual
        index, bounds = get_vision_window_index(
            grid,
            spatial_merge_size=tower.spatial_merge_size,
            window_size=tower.window_size,
            patch_size=tower.patch_size,
        )
        of_frames = super().patches(inner, grid)
        return replace(of_frames, window_index=index, windows=Runs.of(bounds))

    def windowed(self, inner: Any) -> "Collection[nn.Module]":
        tower = inner.visual
        full = set(tower.fullatt_block_indexes)
        return frozenset(block.attn for at, block in enumerate(tower.blocks) if at not in full)


class Qwen3VL(Family):
    """Qwen3-VL, dense and with experts. It interpolates the position embeddings of patches."""

    def patches(self, inner: Any, grid: "Tensor") -> "Patches":
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights

        tower = inner.visual
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
        plain = super().patches(inner, grid)
        rows = {**plain.rows, "interp_indices": indices, "interp_weights": weights}
        return replace(plain, rows=rows)


class Qwen35(Qwen3VL):
    """Qwen3.5, dense and with experts: three of four layers are linear attention."""

    language_linear = (
        r".*language_model.*\.((q|k|v|o|gate|up|down)_proj|in_proj_(qkv|z|a|b)|out_proj)"
    )
    linear_attention = ".linear_attn"


QWEN_VL = Family()
QWEN2_5_VL = Qwen25VL()
QWEN3_VL = Qwen3VL()
QWEN3_5 = Qwen35()
