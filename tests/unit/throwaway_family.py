"""A model family of the tests: LLaVA, with one plain row of positions and square images."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learner.models.families import Multimodal, Part


class SquareImages(NamedTuple):
    """Every image is resized to a square."""

    per_image: int
    max_aspect: int = 50

    def tokens(self, width: int, height: int) -> int | None:
        return None if max(width, height) > self.max_aspect * min(width, height) else self.per_image


class Llava:
    placeholder = "<|image_pad|>"
    inputs = ("pixel_values",)
    language_linear = r".*language_model.*\.(q|v)_proj"
    patch_embedding = None

    def image_rule(self, folder: Path) -> SquareImages:
        return SquareImages(per_image=16)

    def inner(self, model: Any) -> Multimodal:
        found: Multimodal = model.model
        return found

    def part_of(self, name: str) -> Part:
        if "vision_tower" in name:
            return "vision"
        return "aligner" if "multi_modal_projector" in name else "language"

    def vision_tower(self, inner: Any) -> torch.nn.Module:
        found: torch.nn.Module = inner.vision_tower
        return found

    def patches(self, inner: Multimodal, grid: Tensor | None) -> None:
        return None

    def windowed(self, inner: Multimodal) -> tuple[torch.nn.Module, ...]:
        return ()

    def smallest_image(self, inner: Multimodal) -> None:
        return None

    def positions(
        self, inner: Multimodal, ids: Tensor, types: Tensor, grid: Tensor | None
    ) -> Tensor:
        assert grid is None
        return self.text_positions(ids.numel())

    def text_positions(self, length: int) -> Tensor:
        return torch.arange(length)[None]

    def position_ids(self, positions: Tensor) -> Tensor:
        return positions


LLAVA = Llava()
