"""Inputs of a vision tower that follow from the grids of a pack's images.

They are computed on the host when packs are made. A tower would compute them from grids on the
device, and the host would wait for the device, in some models in every layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


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
    """The patches of all images of a pack.

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
