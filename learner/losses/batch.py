"""What the objectives see of one packed forward: its supervision, then its logits."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


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
class LossBatch:
    """Logits that predict the supervised tokens of one packed row.

    Every logit row was read at position p-1 for a token at p. T supervised text tokens,
    K supervised coordinate tokens, N supervised boxes, V vocabulary.

    text_logits: (T, V); text_targets: (T,) token ids; text_roles: (T,) `Role` values;
    text_weights: (T,) cross-entropy weights, > 0.
    text_coord_logits: (T, 1000), `text_logits` at the coordinate ids.
    coord_full_logits: (K, V); coord_logits: (K, 1000); coord_bins: (K,) in
    [0, 999], fractions between bins allowed.
    boxes: (N, 4) indices into K, in x1, y1, x2, y2 order.
    """

    text_logits: Tensor
    text_targets: Tensor
    text_roles: Tensor
    text_weights: Tensor
    text_coord_logits: Tensor
    coord_full_logits: Tensor
    coord_logits: Tensor
    coord_bins: Tensor
    boxes: Tensor


class Term(NamedTuple):
    """One additive part of a module's loss: its name in the logs and its value."""

    name: str
    family: Literal["text", "coord"]
    value: Tensor
