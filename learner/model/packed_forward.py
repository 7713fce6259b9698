"""Segments and packs, and the one forward that serves both channels (PACK-04).

A packed row holds several segments. Qwen3-VL keeps them apart when it is given four rows
of position ids (text positions and the three of multimodal RoPE), each restarting per
segment, no attention mask and no cache: the text row's restarts become block-diagonal
causal attention. With fewer rows or a mask, segments leak into each other silently, so
`check_packing` proves the property on the loaded model before training starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from learner.losses.supervision import Supervision
from learner.types import Role, Target
from shared_contracts.errors import ContractError


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model's own processor encodes it, image placeholders expanded.

    ids: (P,); mm_token_types: (P,) 0 text, 1 image; pixel_values: (patches, dim) or None;
    image_grid_thw: (images, 3) or None.
    """

    ids: Tensor
    mm_token_types: Tensor
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors that grow with the prompt and its images."""
        tensors = (self.ids, self.mm_token_types, self.pixel_values)
        return sum(t.nbytes for t in tensors if t is not None)


@dataclass(frozen=True)
class Segment:
    """One sample, teacher-forced: prompt (P ids) + target (T ids), L = P + T.

    has_dropped: the rollout lost an invalid object (LOSS-01's multiplier).
    """

    sample_id: str
    prompt: EncodedPrompt
    target: Target
    input_ids: Tensor
    position_ids: Tensor
    has_dropped: bool

    def __len__(self) -> int:
        return int(self.input_ids.numel())


@dataclass(frozen=True)
class Pack:
    """Segments in one row of L tokens: input_ids (1, L), position_ids (4, 1, L)."""

    sample_ids: list[str]
    input_ids: Tensor
    position_ids: Tensor
    mm_token_types: Tensor
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    supervision: Supervision

    def __len__(self) -> int:
        return int(self.input_ids.numel())

    def to(self, device: torch.device) -> "Pack":
        pixels, grid = self.pixel_values, self.image_grid_thw
        return Pack(
            sample_ids=self.sample_ids,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            mm_token_types=self.mm_token_types.to(device),
            pixel_values=None if pixels is None else pixels.to(device),
            image_grid_thw=None if grid is None else grid.to(device),
            supervision=self.supervision.to(device),
        )


class Multimodal(Protocol):
    """What is asked of a multimodal model besides its forward."""

    def get_rope_index(
        self, input_ids: Tensor, mm_token_type_ids: Tensor, *, image_grid_thw: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Its own rule for three rows of rotary positions: (3, batch, L), and offsets."""

    def get_input_embeddings(self) -> nn.Module:
        """From token ids to embeddings; whoever calls it has its hooks run, too."""


def rope_positions(model: Multimodal, ids: Tensor, types: Tensor, grid: Tensor | None) -> Tensor:
    """Position ids of one segment by the model's own rule; (L,), (L,) -> (4, L)."""
    spatial, _ = model.get_rope_index(ids[None], types[None], image_grid_thw=grid)
    text = torch.arange(ids.numel(), dtype=ids.dtype)
    return torch.cat([text[None], spatial[:, 0]])


def make_segment(
    model: Multimodal, sample_id: str, prompt: EncodedPrompt, target: Target, has_dropped: bool
) -> Segment:
    """Join a prompt and its target. `model` is the inner multimodal model."""
    tail = torch.tensor(target.token_ids, dtype=torch.long)
    ids = torch.cat([prompt.ids, tail])
    types = torch.cat([prompt.mm_token_types, torch.zeros_like(tail)])
    positions = rope_positions(model, ids, types, prompt.image_grid_thw)
    segment = Segment(sample_id, prompt, target, ids, positions, has_dropped)
    _check_supervised_span(segment)
    return segment


def _check_supervised_span(segment: Segment) -> None:
    """Every supervised index lies in the assistant span (APPEND-03)."""
    length = len(segment.target.token_ids)
    for group in segment.target.coord_groups:
        for position in group.positions:
            if not 0 <= position < length:
                raise ContractError(
                    segment.sample_id,
                    f"supervised index {position} lies outside the {length} assistant tokens",
                    "This is a defect of the target construction; please report the sample",
                )


def _supervision(segments: Sequence[Segment]) -> Supervision:
    roles: list[Tensor] = []
    dropped: list[Tensor] = []
    positions: list[int] = []
    bins: list[float] = []
    boxes: list[list[int]] = []
    offset = 0
    for segment in segments:
        prompt_len = segment.prompt.ids.numel()
        prompt_roles = torch.full((prompt_len,), int(Role.PROMPT), dtype=torch.int8)
        roles += [prompt_roles, torch.from_numpy(segment.target.role)]
        dropped.append(torch.full((len(segment),), segment.has_dropped))
        for group in segment.target.coord_groups:
            if group.is_box:
                boxes.append(list(range(len(positions), len(positions) + 4)))
            positions += [offset + prompt_len + p for p in group.positions]
            bins += group.bins
        offset += len(segment)
    return Supervision(
        input_ids=torch.cat([s.input_ids for s in segments]),
        roles=torch.cat(roles),
        has_dropped=torch.cat(dropped),
        coord_positions=torch.tensor(positions, dtype=torch.long),
        coord_bins=torch.tensor(bins, dtype=torch.float32),
        boxes=torch.tensor(boxes, dtype=torch.long).view(-1, 4),
    )


def make_pack(segments: Sequence[Segment]) -> Pack:
    """Concatenate segments; labels and slots move by each segment's offset."""
    pixels = [s.prompt.pixel_values for s in segments if s.prompt.pixel_values is not None]
    grids = [s.prompt.image_grid_thw for s in segments if s.prompt.image_grid_thw is not None]
    types = [
        torch.cat([s.prompt.mm_token_types, torch.zeros(len(s.target.token_ids), dtype=torch.long)])
        for s in segments
    ]
    return Pack(
        sample_ids=[s.sample_id for s in segments],
        input_ids=torch.cat([s.input_ids for s in segments])[None],
        position_ids=torch.cat([s.position_ids for s in segments], dim=1)[:, None],
        mm_token_types=torch.cat(types)[None],
        pixel_values=torch.cat(pixels) if pixels else None,
        image_grid_thw=torch.cat(grids) if grids else None,
        supervision=_supervision(segments),
    )


def packed_logits(model: nn.Module, pack: Pack, embeddings: Tensor | None = None) -> Tensor:
    """Logits of every position of the pack; (L, V). One full forward, no cache.

    embeddings: (1, L, hidden) in the place of the token ids; image placeholders in them are
        the model's own, which puts what it sees there.
    """
    output = model(
        input_ids=pack.input_ids if embeddings is None else None,
        inputs_embeds=embeddings,
        position_ids=pack.position_ids,
        mm_token_type_ids=pack.mm_token_types,
        pixel_values=pack.pixel_values,
        image_grid_thw=pack.image_grid_thw,
        attention_mask=None,
        use_cache=False,
    )
    logits: Tensor = output.logits
    return logits.squeeze(0)  # a view: backward would copy the gradient of an index


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Prove that segments of a packed row cannot see each other (PACK-04).

    Changes the first of two text segments and asks whether the second one's logits move.

    Raises:
        ContractError: they do; the attention implementation does not separate segments.
    """
    device = next(model.parameters()).device
    length = 8
    positions = torch.arange(length, device=device).repeat(2)[None, None].expand(4, 1, -1)
    tail = torch.arange(1, length + 1, device=device)

    def second_half(first_token: int) -> Tensor:
        head = torch.full((length,), first_token, device=device)
        ids = torch.cat([head, tail])[None]
        out = model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False)
        logits: Tensor = out.logits[0, length:]
        return logits

    was_training = model.training
    model.eval()
    moved = (second_half(1) - second_half(2)).abs().max().item()
    model.train(was_training)
    if not moved <= 1e-3:  # also where it is no number
        raise ContractError(
            "training.packing",
            f"packed segments see each other with this model and attention (logits move by "
            f"{moved:.3g})",
            "Set model.attn_implementation to sdpa or eager, or training.packing to false",
        )
