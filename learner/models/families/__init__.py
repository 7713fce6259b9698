"""Families of models: one module for each, chosen by the `model_type` of the checkpoint.

A family knows how its models place tokens and images, which modules are trained, and how a packed
row keeps its segments apart. `CONTRIBUTING.md` says how another one is added.
"""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from learner.config.registry import model_family
from learner.data.lengths import ImageRule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from learner.models.patches import Patches, SmallestImage

# What has a learning rate of its own.
Part = Literal["language", "vision", "aligner"]


class Multimodal(Protocol):
    """The module between the model and its parts: embeddings, positions, vision.

    config: transformers' config, with `model_type`.
    """

    config: Any

    def get_input_embeddings(self) -> "nn.Module":
        """From token ids to embeddings; a call runs the hooks of the module, too."""


class Family(Protocol):
    """What the learner asks of a model family. Modules import torch inside of these methods.

    placeholder: token of the chat template that stands for an image.
    inputs: those of `mm_token_type_ids`, `pixel_values` and `image_grid_thw` that the model takes.
    language_linear: pattern of the linear layers that `target_modules: all-linear` adapts.
    patch_embedding: end of the name of the convolution that `patch_embedding.py` makes a product;
        None: the vision tower is left as it is.
    """

    @property
    def placeholder(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def language_linear(self) -> str: ...
    @property
    def patch_embedding(self) -> str | None: ...

    def image_rule(self, folder: Path) -> ImageRule:
        """How many tokens an image takes, by the processor in a folder. Imports no torch."""

    def inner(self, model: "nn.Module") -> Multimodal:
        """The multimodal module of a model for conditional generation."""

    def part_of(self, name: str) -> Part:
        """The part of the model that a parameter belongs to."""

    def vision_tower(self, inner: Multimodal) -> "nn.Module":
        """The module that sees the patches of images."""

    def patches(self, inner: Multimodal, grid: "Tensor | None") -> "Patches | None":
        """What the vision tower needs to know of the patches of (images, 3) grids on the host.

        None where there are no images, or where the tower computes it itself.
        """

    def windowed(self, inner: Multimodal) -> "Collection[nn.Module]":
        """The attention modules of the vision tower that attend within windows of an image."""

    def smallest_image(self, inner: Multimodal) -> "SmallestImage | None":
        """An image that the model can be shown without a processor; None where there is none."""

    def positions(
        self, inner: Multimodal, ids: "Tensor", types: "Tensor", grid: "Tensor | None"
    ) -> "Tensor":
        """Positions of one segment of L tokens, images included; (L,), (L,) -> (rows, L)."""

    def text_positions(self, length: int) -> "Tensor":
        """Positions of text alone; (rows, length)."""

    def position_ids(self, positions: "Tensor") -> "Tensor":
        """What the forward takes for a row of segments; (rows, L) -> its own shape.

        Their restarts are what keeps the segments of a pack apart: the forward gets no mask.
        """


class PromptTensors(Protocol):
    """The images of a prompt, or of a pack."""

    @property
    def pixel_values(self) -> "Tensor | None": ...
    @property
    def image_grid_thw(self) -> "Tensor | None": ...


def family_of(model: Any) -> Family:
    """The family of a model, or of its multimodal module, by its config."""
    found: Family = model_family(model.config.model_type)
    return found


def vision_inputs(
    family: Family, images: PromptTensors, types: "Tensor"
) -> "dict[str, Tensor | None]":
    """Arguments of a forward beside ids and positions. types: 1 where an image is."""
    known = {
        "mm_token_type_ids": types,
        "pixel_values": images.pixel_values,
        "image_grid_thw": images.image_grid_thw,
    }
    return {name: known[name] for name in family.inputs}
