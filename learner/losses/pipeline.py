"""The declared objective, composed: readings of one pack in, one scalar and its atoms out.

    Supervision -> select() -> Selection
    logits -> reader() -> Readings -> token_ce, bbox_geo, coord_reg -> PackLoss
                                   -> coord_diag

Nothing runs that the config does not declare (CFG-08), no term whose weight is 0, and none on a
pack that has nothing for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.config.pipeline import (
    CoordRegModule,
    ObjectiveModule,
    PipelineConfig,
    TokenCEModule,
)
from learner.losses.bbox_geo import bbox_geo
from learner.losses.coord_diag import coord_diag
from learner.losses.coord_reg import coord_reg
from learner.losses.reading import Reader, Readings
from learner.losses.supervision import Selection, Supervision, select
from learner.losses.term import Term
from learner.losses.token_ce import self_context_ce, token_ce, token_weights
from learner.types import Channel

_FAMILY_PREFIX: dict[tuple[Channel, str], str] = {
    ("A", "text"): "loss/A1_text",
    ("A", "context_text"): "loss/A2_text",
    ("A", "coord"): "loss/A2_coord",
    ("B", "text"): "loss/B_rollout_text",
    ("B", "coord"): "loss/B_coord",
}


@dataclass(frozen=True)
class PackLoss:
    """total: differentiable scalar; atoms: its weighted parts, which add up to it.

    diagnostics: sums over the pack's slots, by key; slots: their number.
    """

    total: Tensor
    atoms: dict[str, float]
    diagnostics: dict[str, float]
    slots: int


class Pipeline:
    """Objective and diagnostics modules with their weights, per channel."""

    def __init__(self, config: PipelineConfig, coord_ids: list[int]) -> None:
        self._modules = config.objective
        self._diagnostics = config.diagnostics
        self._coord_ids = torch.tensor(coord_ids)
        enabled = [module for module in config.objective if module.enabled]
        self._text = next((m for m in enabled if isinstance(m, TokenCEModule)), None)
        self._reg = next((m for m in enabled if isinstance(m, CoordRegModule)), None)

    def select(self, row: Supervision, channel: Channel) -> Selection:
        """What the declared modules are trained on in a row."""
        return select(row, self._text_weights(row, channel))

    def reader(self, selection: Selection) -> Reader:
        """Reads logits, (L, V), of a row for the declared modules."""
        return Reader(
            selection,
            self._coord_ids.to(selection.slot_rows.device),
            self._temperature,
            final_text=self._reads_final_text(),
        )

    def __call__(self, readings: Readings, selection: Selection, channel: Channel) -> PackLoss:
        """Loss of one pack over `selection.totals`."""
        # Every forward is part of the loss, whatever the pack holds: ranks synchronize over it.
        total = 0.0 * (readings.anchor.slot_lse.sum() + readings.final.slot_lse.sum())
        atoms: dict[str, Tensor] = {}
        for module in self._modules:
            if not module.counts_in(channel):
                continue
            for term in _terms(module, readings, selection):
                weighted = module.weight * term.value
                total = total + weighted
                key = f"{_FAMILY_PREFIX[channel, term.family]}/{term.name}"
                atoms[key] = weighted.detach()
        values = torch.stack(list(atoms.values())).tolist() if atoms else []
        return PackLoss(
            total,
            dict(zip(atoms, values, strict=True)),
            self._monitor(readings, selection, channel),
            len(selection.slot_rows),
        )

    def _monitor(
        self, readings: Readings, selection: Selection, channel: Channel
    ) -> dict[str, float]:
        if not any(module.counts_in(channel) for module in self._diagnostics):
            return {}
        seen = {"B" if channel == "B" else "A1": readings.anchor}
        if readings.final is not readings.anchor:
            seen["A2"] = readings.final
        return {
            f"coord_diag/{provenance}/{name}": value
            for provenance, reading in seen.items()
            for name, value in coord_diag(reading, selection, self._temperature).items()
        }

    @property
    def _temperature(self) -> float:
        return self._reg.config.temperature if self._reg is not None else 1.0

    def _reads_final_text(self) -> bool:
        if self._reg is not None and self._reg.config.text_gate_weight > 0:
            return True
        return self._text is not None and self._text.config.self_context_struct_ce_weight > 0

    def _text_weights(self, row: Supervision, channel: Channel) -> Tensor:
        """(L,) weights; all zero when `token_ce` is not declared for the channel."""
        if self._text is None or channel not in self._text.channels:
            return torch.zeros(row.roles.shape, device=row.roles.device)
        return token_weights(row.roles, row.has_dropped, self._text.config, channel)


def _terms(module: ObjectiveModule, readings: Readings, selection: Selection) -> Iterator[Term]:
    anchor, final = readings
    match module.name:
        case "token_ce":
            yield from token_ce(anchor, selection)
            if final is not anchor and module.config.self_context_struct_ce_weight > 0:
                yield from self_context_ce(final, selection, module.config)
        case "bbox_geo":
            yield from bbox_geo(final, selection, module.config)
        case "coord_reg":
            yield from coord_reg(final, selection, module.config)
