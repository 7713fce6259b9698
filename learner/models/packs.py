"""Segments and packs: teacher-forced samples, and several of them in one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from learner.models.attention import Patches
from learner.models.families import family_of
from learner.models.prompts import EncodedPrompt
from learner.objectives.logit_stats import Supervision
from learner.types import Role, Target
from shared_contracts.errors import ContractError

# A placeholder of an image among `mm_token_types`.
IMAGE = 1


@dataclass(frozen=True)
class Segment:
    """One sample, teacher-forced: prompt (P ids) + target (T ids), L = P + T.

    has_dropped: the rollout lost an invalid object (LOSS-01's multiplier).
    model: the inner multimodal model.
    kept_logprobs: those that the engine gave the first target ids, which are the rollout's own, in
        nats; none where they were not requested (LOGP-01).
    advantages: of the same ids; zeros where answers are not compared (GROUP-01).
    """

    model: PreTrainedModel
    sample_id: str
    prompt: EncodedPrompt
    target: Target
    input_ids: Tensor
    position_ids: Tensor
    has_dropped: bool
    kept_logprobs: Sequence[float] = ()
    advantages: Sequence[float] = ()

    def __len__(self) -> int:
        return int(self.input_ids.numel())


@dataclass(frozen=True)
class Pack:
    """Segments in one row of L tokens: input_ids (1, L), position_ids (4, 1, L).

    bounds: (segments + 1,) int32, where each segment starts, and L. lengths: tokens of each.
    image_grid_thw: on the host, whatever the device. patches: None where there are no images.
    """

    sample_ids: list[str]
    input_ids: Tensor
    position_ids: Tensor
    mm_token_types: Tensor
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    supervision: Supervision
    bounds: Tensor
    lengths: tuple[int, ...]
    patches: Patches | None = None

    def __len__(self) -> int:
        return int(self.input_ids.numel())

    def to(self, device: torch.device) -> "Pack":
        moved = (Tensor, Supervision, Patches)
        parts: dict[str, Any] = {
            name: part.to(device) if isinstance(part, moved) else part
            for name, part in vars(self).items()
        }
        return Pack(**parts | {"image_grid_thw": self.image_grid_thw})


def make_segment(
    model: PreTrainedModel,
    sample_id: str,
    prompt: EncodedPrompt,
    target: Target,
    has_dropped: bool,
    kept_logprobs: Sequence[float] = (),
    advantages: Sequence[float] = (),
) -> Segment:
    """Join a prompt and its target.

    Raises ContractError for a supervised index outside of the target (APPEND-03).
    """
    tail = torch.tensor(target.token_ids, dtype=torch.long)
    ids = torch.cat([prompt.ids, tail])
    types = _types(prompt, target)
    positions = family_of(model).positions(model, ids, types, prompt.image_grid_thw)
    for position in chain.from_iterable(group.positions for group in target.coord_groups):
        if not 0 <= position < len(tail):
            raise ContractError(
                sample_id,
                f"supervised index {position} lies outside the {len(tail)} assistant tokens",
                "This is a defect of the target construction; please report the sample",
            )
    return Segment(
        model, sample_id, prompt, target, ids, positions, has_dropped, kept_logprobs, advantages
    )


def _types(prompt: EncodedPrompt, target: Target) -> Tensor:
    """Return the `mm_token_types` of a segment, (L,); a target is text."""
    return pad(prompt.mm_token_types, (0, len(target.token_ids)))


def _supervision(segments: Sequence[Segment]) -> Supervision:
    roles: list[Tensor] = []
    positions: list[int] = []
    bins: list[float] = []
    boxes: list[list[int]] = []
    departures: list[list[int]] = []
    kept: list[int] = []
    offset = 0
    for segment in segments:
        start = offset + segment.prompt.ids.numel()  # of the target
        prompt_roles = torch.full_like(segment.prompt.ids, Role.PROMPT, dtype=torch.int8)
        roles += [prompt_roles, torch.from_numpy(segment.target.role)]
        for group in segment.target.coord_groups:
            if group.is_box:
                boxes.append(list(range(len(positions), len(positions) + 4)))
            positions += [start + p for p in group.positions]
            bins += group.bins
        departures += [[start + p, token] for p, token in segment.target.departures]
        kept += range(start, start + len(segment.kept_logprobs))
        offset += len(segment)
    return Supervision(
        input_ids=torch.cat([s.input_ids for s in segments]),
        roles=torch.cat(roles),
        has_dropped=torch.cat([torch.full((len(s),), s.has_dropped) for s in segments]),
        coord_positions=torch.tensor(positions, dtype=torch.long),
        coord_bins=torch.tensor(bins, dtype=torch.float32),
        boxes=torch.tensor(boxes, dtype=torch.long).view(-1, 4),
        departures=torch.tensor(departures, dtype=torch.long).view(-1, 2),
        kept_positions=torch.tensor(kept, dtype=torch.long),
        kept_logprobs=torch.tensor(
            [p for s in segments for p in s.kept_logprobs], dtype=torch.float32
        ),
        kept_advantages=torch.tensor(
            [a for s in segments for a in s.advantages], dtype=torch.float32
        ),
    )


def make_pack(segments: Sequence[Segment]) -> Pack:
    """Concatenate segments; labels and slots move by each segment's offset."""
    pixels = [s.prompt.pixel_values for s in segments if s.prompt.pixel_values is not None]
    grids = [s.prompt.image_grid_thw for s in segments if s.prompt.image_grid_thw is not None]
    model = segments[0].model
    grid = torch.cat(grids) if grids else None
    lengths = [len(segment) for segment in segments]
    return Pack(
        sample_ids=[s.sample_id for s in segments],
        input_ids=torch.cat([s.input_ids for s in segments])[None],
        position_ids=torch.cat([s.position_ids for s in segments], dim=1)[:, None],
        mm_token_types=torch.cat([_types(s.prompt, s.target) for s in segments])[None],
        pixel_values=torch.cat(pixels) if pixels else None,
        image_grid_thw=grid,
        supervision=_supervision(segments),
        bounds=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        lengths=tuple(lengths),
        patches=None if grid is None else family_of(model).patches(model, grid),
    )
