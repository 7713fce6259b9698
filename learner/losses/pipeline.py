"""The declared objective, composed: logits of one pack in, one scalar and its atoms out.

    PackLogits -> supervise() -> LossBatch -> token_ce, bbox_geo, coord_reg -> PackLoss

Nothing runs that the config does not declare (CFG-08).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from learner.config.pipeline import ObjectiveModule
from learner.losses.batch import LossBatch, Supervision, Term
from learner.losses.bbox_geo import bbox_geo
from learner.losses.coord_reg import coord_reg
from learner.losses.token_ce import token_ce, token_weights
from learner.types import Channel

_FAMILY_PREFIX: dict[tuple[Channel, str], str] = {
    ("A", "text"): "loss/A1_text",
    ("A", "coord"): "loss/A2_coord",
    ("B", "text"): "loss/B_rollout_text",
    ("B", "coord"): "loss/B_coord",
}


@dataclass(frozen=True)
class PackLoss:
    """total: differentiable scalar; atoms: its weighted parts, which add up to it."""

    total: Tensor
    atoms: dict[str, float]


class Pipeline:
    """Objective modules with their weights, per channel."""

    def __init__(self, modules: Sequence[ObjectiveModule], coord_ids: list[int]) -> None:
        self._modules = [module for module in modules if module.enabled]
        self._coord_ids = torch.tensor(coord_ids)

    def __call__(self, logits: Tensor, row: Supervision, channel: Channel) -> PackLoss:
        """Loss of one pack; logits (L, V), read at p-1 for a token at p."""
        batch = self._batch(logits, row, channel)
        prefix_of = {family: _FAMILY_PREFIX[channel, family] for family in ("text", "coord")}
        total = logits.new_zeros((), dtype=torch.float32)
        atoms: dict[str, Tensor] = {}
        for module in self._modules:
            if channel not in module.channels:
                continue
            for term in _unit(module)(batch):
                weighted = module.weight * term.value
                total = total + weighted
                atoms[f"{prefix_of[term.family]}/{term.name}"] = weighted.detach()
        values = torch.stack(list(atoms.values())).tolist() if atoms else []
        return PackLoss(total, dict(zip(atoms, values, strict=True)))

    def _batch(self, logits: Tensor, row: Supervision, channel: Channel) -> LossBatch:
        coord_ids = self._coord_ids.to(logits.device)
        weights = self._text_weights(row, channel)
        text_positions = weights.nonzero().squeeze(1)
        text_logits = logits[text_positions - 1]
        coord_full = logits[row.coord_positions - 1]
        return LossBatch(
            text_logits=text_logits,
            text_targets=row.input_ids[text_positions],
            text_roles=row.roles[text_positions],
            text_weights=weights[text_positions],
            text_coord_logits=text_logits[:, coord_ids],
            coord_full_logits=coord_full,
            coord_logits=coord_full[:, coord_ids],
            coord_bins=row.coord_bins,
            boxes=row.boxes,
        )

    def _text_weights(self, row: Supervision, channel: Channel) -> Tensor:
        """(L,) weights; all zero when `token_ce` is not declared for the channel."""
        for module in self._modules:
            if module.name == "token_ce" and channel in module.channels:
                return token_weights(row.roles, row.has_dropped, module.config, channel)
        return torch.zeros(row.roles.shape, device=row.roles.device)


def _unit(module: ObjectiveModule) -> Callable[[LossBatch], list[Term]]:
    match module.name:
        case "token_ce":
            return token_ce
        case "bbox_geo":
            return partial(bbox_geo, config=module.config)
        case "coord_reg":
            return partial(coord_reg, config=module.config)
