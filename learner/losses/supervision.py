"""What one packed row teaches, and where its logits say how well it is known."""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.types import Role


@dataclass(frozen=True)
class Supervision:
    """What one packed row of L tokens is trained on; positions count from its start.

    input_ids: (L,). roles: (L,) int8, values of `Role`. has_dropped: (L,) bool, true in
    samples that lost an invalid object. coord_positions: (K,). coord_bins: (K,) float, in bins.
    boxes: (N, 4) indices into K.
    """

    input_ids: Tensor
    roles: Tensor
    has_dropped: Tensor
    coord_positions: Tensor
    coord_bins: Tensor
    boxes: Tensor

    def to(self, device: torch.device) -> "Supervision":
        return Supervision(
            input_ids=self.input_ids.to(device),
            roles=self.roles.to(device),
            has_dropped=self.has_dropped.to(device),
            coord_positions=self.coord_positions.to(device),
            coord_bins=self.coord_bins.to(device),
            boxes=self.boxes.to(device),
        )


@dataclass(frozen=True)
class Totals:
    """Denominators of the means of a forward; 0 where a row has none of a kind, and so no term.

    The objectives are handed them, so that the losses of parts of a row, each over the
    totals of the whole, add up to the loss of the whole.

    text_weight, struct_weight: () sums of cross-entropy weights, over all supervised text
    and over its structure and closure. text, slots, boxes: counts.
    """

    text_weight: Tensor
    struct_weight: Tensor
    text: int
    slots: int
    boxes: int


@dataclass(frozen=True)
class Selection:
    """The supervised tokens of a row, and the rows of logits that predict them.

    A token at position p is predicted by the logits at p-1: so are all rows here.

    text_rows: (T,); text_targets: (T,) token ids; text_roles: (T,) `Role` values;
    text_weights: (T,) cross-entropy weights, > 0.
    slot_rows: (K,); slot_bins: (K,) in [0, 999], fractions between bins allowed.
    boxes: (N, 4) indices into K, in x1, y1, x2, y2 order.
    """

    text_rows: Tensor
    text_targets: Tensor
    text_roles: Tensor
    text_weights: Tensor
    slot_rows: Tensor
    slot_bins: Tensor
    boxes: Tensor
    totals: Totals


def select(row: Supervision, weights: Tensor) -> Selection:
    """The supervised tokens of a row; weights: (L,) of its text tokens, 0 where none is taught."""
    positions = weights.nonzero().squeeze(1)
    text_weights, roles = weights[positions], row.roles[positions]
    return Selection(
        text_rows=positions - 1,
        text_targets=row.input_ids[positions],
        text_roles=roles,
        text_weights=text_weights,
        slot_rows=row.coord_positions - 1,
        slot_bins=row.coord_bins,
        boxes=row.boxes,
        totals=Totals(
            text_weight=text_weights.sum(),
            struct_weight=text_weights[~is_description(roles)].sum(),
            text=len(positions),
            slots=len(row.coord_positions),
            boxes=len(row.boxes),
        ),
    )


def is_description(roles: Tensor) -> Tensor:
    """(T,) `Role` values of supervised text -> (T,) bool; the rest is structure and closure."""
    return roles == Role.APPENDED_DESC
