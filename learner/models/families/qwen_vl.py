"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, the last two also as mixtures of experts.

Four rows of positions, those of the text and the three of multimodal RoPE, keep the segments of a
packed row apart: each restarts per segment, and without a mask and a cache the text row's restarts
become block-diagonal causal attention. With fewer rows segments leak into each other silently.
Layers of linear attention need the bounds of segments (`linear_attention.py`).
"""

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from learner.data.lengths import read_json
from shared_contracts.errors import ContractError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from learner.models.patches import Patches

# What has a learning rate of its own.
Part = Literal["language", "vision", "aligner"]

# The processor refuses images that are longer than this many times their other side.
MAX_ASPECT = 200

# Of transformers' processor, where the checkpoint does not say it.
_DEFAULT_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


class QwenImageRule(NamedTuple):
    """How many tokens an image takes, by the rule of Qwen's image processor.

    The processor resizes to whole blocks of `patch_size * merge_size` pixels, about the same aspect
    and a number of pixels within its bounds; each block becomes one token. It is written down here
    because transformers' processor cannot be imported without torch.

    block: side of one token's pixels; the other two bound the pixels of a resized image.
    """

    block: int
    min_pixels: int
    max_pixels: int
    max_aspect: int = MAX_ASPECT

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "QwenImageRule":
        """The rule in the checkpoint's files; ContractError where there is none or another."""
        where, processor = _processor(folder)
        if not str(processor.get("image_processor_type")).startswith("Qwen2VLImageProcessor"):
            raise _not_of_qwen(
                where, f"image_processor_type {processor.get('image_processor_type')}"
            )
        size = processor.get("size") or _DEFAULT_SIZE
        sides = [processor.get("patch_size", 14), processor.get("merge_size", 2)]
        try:
            bounds = [
                processor.get("min_pixels") or size["shortest_edge"],
                processor.get("max_pixels") or size["longest_edge"],
            ]
        except (KeyError, TypeError) as error:
            raise _not_of_qwen(where, f"no {error}") from None
        if not all(type(value) is int and value > 0 for value in sides + bounds):
            raise _not_of_qwen(where, f"sides {sides} and bounds of pixels {bounds}")
        return cls(sides[0] * sides[1], *bounds)

    def tokens(self, width: int, height: int) -> int | None:
        """Tokens of an image, None for one that is too narrow for the processor."""
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
    """The settings of the image processor and the file they are in, as transformers finds them."""
    nested, alone = folder / "processor_config.json", folder / "preprocessor_config.json"
    if nested.is_file() and "image_processor" in (settings := read_json(nested)):
        if not isinstance(settings["image_processor"], dict):
            raise _not_of_qwen(nested, "an image_processor that is no object")
        return nested, settings["image_processor"]
    if not alone.is_file():
        raise ContractError(
            str(folder),
            f"no {nested.name} with an image_processor, and no {alone.name}",
            "Give the folder of a checkpoint saved with its processor",
        )
    return alone, read_json(alone)


def _not_of_qwen(where: Path, found: str) -> ContractError:
    return ContractError(
        str(where), found, "Use a model of the Qwen-VL family, whose image tokens are known here"
    )


class Multimodal(Protocol):
    """The module between the model and its parts: embeddings, positions, vision.

    config: transformers' config, with `model_type`.
    """

    config: Any

    def get_input_embeddings(self) -> "nn.Module":
        """From token ids to embeddings; a call runs the hooks of the module, too."""


class Family:
    """Qwen2-VL, and what all of them have in common; see the module's docstring.

    placeholder: token of the chat template that stands for an image.
    inputs: what the model takes beside ids and positions, in the order of `vision_inputs`.
    language_linear: pattern of the linear layers that `target_modules: all-linear` adapts.
    linear_attention: end of the names of the layers of linear attention; None where it has none.
    patch_embedding: end of the name of the convolution that `patch_embedding.py` makes a product.
    """

    placeholder = "<|image_pad|>"
    inputs = ("mm_token_type_ids", "pixel_values", "image_grid_thw")
    language_linear = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    linear_attention: str | None = None
    patch_embedding = "patch_embed.proj"

    def image_rule(self, folder: Path) -> QwenImageRule:
        """How many tokens an image takes, by the processor in a folder. Imports no torch."""
        return QwenImageRule.of_checkpoint(folder)

    def inner(self, model: Any) -> Multimodal:
        """The multimodal module of a model for conditional generation."""
        inner: Multimodal = model.model
        return inner

    def part_of(self, name: str) -> Part:
        """The part of the model that a parameter belongs to.

        The aligner merges patches into language tokens: `merger`, `deepstack_merger_list`.
        """
        parts = name.split(".")
        if "visual" not in parts:
            return "language"
        return "aligner" if any("merger" in part for part in parts) else "vision"

    def patches(self, inner: Any, grid: "Tensor") -> "Patches":
        """What the vision tower needs to know of the patches of (images, 3) grids on the host.

        By transformers' own functions, as its towers call them.
        """
        from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

        from learner.models.patches import Patches, Runs

        rows = {"position_ids": get_vision_position_ids(grid, inner.visual.spatial_merge_size)}
        return Patches(rows, Runs.of(get_vision_cu_seqlens(grid)))

    def windowed(self, inner: Any) -> "Collection[nn.Module]":
        """The attention modules of the vision tower that attend within windows of an image."""
        return ()

    def positions(
        self, inner: Any, ids: "Tensor", types: "Tensor", grid: "Tensor | None"
    ) -> "Tensor":
        """Positions of one segment of L tokens, images included; (L,), (L,) -> (4, L)."""
        import torch

        spatial, _ = inner.get_rope_index(ids[None], types[None], image_grid_thw=grid)
        text = torch.arange(ids.numel(), dtype=ids.dtype)
        return torch.cat([text[None], spatial[:, 0]])

    def position_ids(self, positions: "Tensor") -> "Tensor":
        """What the forward takes for a row of segments; (4, L) -> (4, 1, L).

        Their restarts are what keeps the segments of a pack apart: the forward gets no mask.
        """
        return positions[:, None]


class Qwen25VL(Family):
    """Qwen2.5-VL, most of whose layers attend within windows of an image."""

    def patches(self, inner: Any, grid: "Tensor") -> "Patches":
        from transformers.vision_utils import get_vision_window_index

        from learner.models.patches import Runs

        tower = inner.visual
        index, bounds = get_vision_window_index(
            grid,
            spatial_merge_size=tower.spatial_merge_size,
            window_size=tower.window_size,
            patch_size=tower.patch_size,
        )
        found = super().patches(inner, grid)
        return replace(found, window_index=index, windows=Runs.of(bounds))

    def windowed(self, inner: Any) -> "Collection[nn.Module]":
        tower = inner.visual
        whole = set(tower.fullatt_block_indexes)
        return frozenset(block.attn for at, block in enumerate(tower.blocks) if at not in whole)


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
        found = super().patches(inner, grid)
        rows = {**found.rows, "interp_indices": indices, "interp_weights": weights}
        return replace(found, rows=rows)


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
