"""The declared objective: from the statistics of one pack to a scalar loss and its parts.

    Supervision -> select() -> Selection
    logits -> reader() -> ForwardStats -> Objective.terms() of each module -> PackLoss
                                       -> Diagnostic.sums()

Only declared modules run (CFG-08), and only terms with a weight above 0 and an input.
"""

from dataclasses import dataclass, field, replace
from typing import get_args

import torch
from torch import Tensor

from learner.objectives.config import PipelineConfig
from learner.objectives.logit_stats import (
    ForwardStats,
    LogitStats,
    Reader,
    Selection,
    Supervision,
    select,
)
from learner.objectives.mismatch import Mismatch
from learner.objectives.objective import LOSS_PREFIX
from learner.types import Channel


@dataclass(frozen=True)
class PackLoss:
    """total: differentiable scalar; atoms: its weighted parts, which add up to it.

    diagnostics: sums over the pack's slots, by key; slots: their number.
    mismatch: of the pack's kept tokens; None if it has none. tokens: (sum, number of kept tokens)
    of monitors, by key.
    """

    total: Tensor
    atoms: dict[str, float]
    diagnostics: dict[str, float]
    slots: int
    mismatch: Mismatch | None = None
    tokens: dict[str, tuple[float, float]] = field(default_factory=dict)


class Pipeline:
    """Objective and diagnostics modules with their weights, per channel."""

    def __init__(self, config: PipelineConfig, coord_ids: list[int]) -> None:
        channels: tuple[Channel, ...] = get_args(Channel)
        self._modules = {c: [m for m in config.objective if m.counts_in(c)] for c in channels}
        self._diagnostics = {c: [m for m in config.diagnostics if m.counts_in(c)] for c in channels}
        self._coord_ids = torch.tensor(coord_ids)
        enabled = [module for module in config.objective if module.enabled]
        self._text = next((m for m in enabled if m.reads("text")), None)
        self._reads_last_text = any(m.reads_last_text for m in enabled)
        of_gates = (m.gate_temperature for m in enabled)
        self._temperature = next((t for t in of_gates if t is not None), 1.0)
        of_departures = (m.departure_radius for m in enabled)
        self._radius = next((radius for radius in of_departures if radius is not None), None)

    def select(self, row: Supervision, channel: Channel) -> Selection:
        """Return what the declared modules supervise in a row; no text without `token_ce`."""
        departures, modules = row.departures, self._modules[channel]
        if not any(m.reads("departure") for m in modules):
            departures = departures[:0]
        elif self._radius is not None:
            coordinates = self._coord_ids.to(departures.device)
            departures = departures[torch.isin(departures[:, 1], coordinates)]
        if self._text is None or channel not in self._text.channels:
            weights = torch.zeros(row.roles.shape, device=row.roles.device)
        else:
            weights = self._text.text_weights(row, channel)
        learns_kept = any(m.reads("answer") for m in modules)
        return replace(select(row, weights, departures), learns_kept=learns_kept)

    def reader(self, selection: Selection) -> Reader:
        """Return the reader of a row's logits (L, V) for the declared modules."""
        ids = self._coord_ids.to(selection.slot_rows.device)
        return Reader(selection, ids, self._temperature, self._reads_last_text, radius=self._radius)

    def __call__(self, stats: ForwardStats, selection: Selection, channel: Channel) -> PackLoss:
        """Return the loss of one pack over `selection.totals`."""
        # Every forward is part of every loss, because ranks synchronize in its backward.
        total = 0.0 * (stats.anchor.slot_lse.sum() + stats.final.slot_lse.sum())
        atoms: dict[str, Tensor] = {}
        for module in self._modules[channel]:
            for term in module.terms(stats, selection):
                weighted = module.weight * term.value
                total = total + weighted
                atoms[f"{LOSS_PREFIX[channel, term.family]}/{term.name}"] = weighted.detach()
        values = torch.stack(list(atoms.values())).tolist() if atoms else []
        forwards = {"B" if channel == "B" else "A1": stats.anchor}
        if stats.final is not stats.anchor:
            forwards["A2"] = stats.final
        diagnostics = {
            f"{module.name}/{provenance}/{name}": value
            for module in self._diagnostics[channel]
            for provenance, forward in forwards.items()
            for name, value in module.sums(forward, selection, self._temperature).items()
        }
        kept = len(selection.kept_rows)
        tokens = {
            f"{module.name}/{name}": (value, float(kept))
            for module in self._modules[channel]
            if kept
            for name, value in module.token_sums(stats, selection).items()
        }
        slots = len(selection.slot_rows)
        named = dict(zip(atoms, values, strict=True))
        mismatch = _mismatch(stats.anchor, selection)
        return PackLoss(total, named, diagnostics, slots, mismatch, tokens)


def _mismatch(stats: LogitStats, selection: Selection) -> Mismatch | None:
    if not len(selection.kept_rows):
        return None
    nats = (selection.kept_logprobs + stats.kept_nll.detach()).abs()
    return Mismatch(selection.kept_roles.cpu().numpy(), nats.double().cpu().numpy())
