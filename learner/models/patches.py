"""What a vision tower needs to know of the patches of a pack, from the grids of its images.

All of it is computed on the host, when packs are made. A tower that computes it itself from grids
on the device makes the host wait for the device, in some models in every layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Runs:
    """Runs of patches that see each other.

    bounds: (runs + 1,) int32, where each starts, and the end. on_host: the same, on the host
    whatever the device of the pack. longest: patches of the longest.
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
    """The patches of all images of a pack.

    rows: arguments of the vision tower, each with one row for each patch.
    frames: those of a frame see each other.
    window_index: (tokens,), which merged patches follow each other so that each window is a run.
    windows: of the patches in that order; some layers attend within them. Both are None where all
        layers attend within frames.
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
