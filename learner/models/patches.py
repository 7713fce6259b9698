"""What a vision tower needs to know of the patches of a pack, from the grids of its images.

    image_grid_thw --Family.patches()--> Patches, of a segment --pack_patches()--> PackedPatches

All of it is computed on the host, when segments and packs are made. A tower that computes it itself
from grids on the device makes the host wait for the device, in some models in every layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """Windows of the images of a segment, which some layers attend within.

    order: (tokens,), which merged patches follow each other so that each window is a run.
    lengths: patches of each window.
    """

    order: Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Patches:
    """The patches of the images of a segment.

    rows: arguments of the vision tower, each with one row for each patch.
    lengths: patches of each frame; those of a frame see each other.
    windows: None where all layers attend within frames.
    """

    rows: Mapping[str, Tensor]
    lengths: tuple[int, ...]
    windows: Windows | None = None


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
    def of(cls, lengths: Sequence[int]) -> "Runs":
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(bounds, bounds, max(lengths))

    def to(self, device: torch.device) -> "Runs":
        return Runs(self.bounds.to(device), self.on_host, self.longest)


@dataclass(frozen=True)
class PackedPatches:
    """The patches of a pack.

    rows: as of `Patches`. window_index, windows: of the whole pack, as of `Windows`.
    """

    rows: Mapping[str, Tensor]
    frames: Runs
    window_index: Tensor | None = None
    windows: Runs | None = None

    def to(self, device: torch.device) -> "PackedPatches":
        return PackedPatches(
            {name: row.to(device) for name, row in self.rows.items()},
            self.frames.to(device),
            None if self.window_index is None else self.window_index.to(device),
            None if self.windows is None else self.windows.to(device),
        )


def pack_patches(segments: Sequence[Patches]) -> PackedPatches:
    """Those of one segment or more, in one row."""
    names = segments[0].rows
    rows = {name: torch.cat([each.rows[name] for each in segments]) for name in names}
    frames = Runs.of([length for each in segments for length in each.lengths])
    windows = [each.windows for each in segments if each.windows is not None]
    if not windows:
        return PackedPatches(rows, frames)
    before = accumulate((len(each.order) for each in windows), initial=0)
    index = torch.cat([each.order + start for each, start in zip(windows, before, strict=False)])
    lengths = [length for each in windows for length in each.lengths]
    return PackedPatches(rows, frames, index, Runs.of(lengths))
