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


class SmallestImage(NamedTuple):
    """An image of one token. token: id of the placeholder; the others as of `EncodedPrompt`."""

    token: int
    pixel_values: Tensor
    image_grid_thw: Tensor


@dataclass(frozen=True)
class Patches:
    """The patches of the images of a segment.

    rows: arguments of the vision tower, each with one row for each patch.
    lengths: of the groups of patches that see each other, in the order of the patches.
    """

    rows: Mapping[str, Tensor]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class PackedPatches:
    """The patches of a pack.

    rows: as of `Patches`. bounds: (groups + 1,) int32, where each group starts, and the end.
    on_host: the same, on the host whatever the device of the pack. longest: patches of the longest.
    """

    rows: Mapping[str, Tensor]
    bounds: Tensor
    on_host: Tensor
    longest: int

    def to(self, device: torch.device) -> "PackedPatches":
        rows = {name: row.to(device) for name, row in self.rows.items()}
        return PackedPatches(rows, self.bounds.to(device), self.on_host, self.longest)


def pack_patches(segments: Sequence[Patches]) -> PackedPatches:
    """Those of one segment or more, in one row."""
    lengths = [length for each in segments for length in each.lengths]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    names = segments[0].rows
    rows = {name: torch.cat([each.rows[name] for each in segments]) for name in names}
    return PackedPatches(rows, bounds, bounds, max(lengths))
