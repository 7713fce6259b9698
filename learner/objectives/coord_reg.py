"""`coord_reg`: losses on the distribution over the 1000 coordinate bins (LOSS-04)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.objectives.objective import LossMetrics, Objective, Term, Weight
from learner.types import COORD_BINS
from shared_contracts.strict_model import Refusal, StrictModel

if TYPE_CHECKING:
    from torch import Tensor

    from learner.objectives.logit_stats import ForwardStats, Selection


class CoordRegConfig(StrictModel):
    coord_ce_weight: Weight = Field(description="weight of the cross-entropy on the bin")
    soft_ce_weight: Weight = Field(
        description="weight of the cross-entropy against a Gaussian around the bin"
    )
    w1_weight: Weight = Field(description="weight of the W1 distance to that Gaussian")
    coord_gate_weight: Weight = Field(
        description="weight of the probability of other tokens at coordinate slots"
    )
    text_gate_weight: Weight = Field(
        description="weight of the probability of coordinate tokens at text positions"
    )
    temperature: float = Field(gt=0, description="the coordinate logits are divided by it")
    target_sigma: float = Field(ge=1e-3, description="width of the Gaussian in bins")
    target_truncate: int | None = Field(
        ge=1, description="bins beyond which the Gaussian is zero; null: never"
    )


class CoordRegModule(Objective):
    """Terms at the supervised coordinate slots, and `text_gate` at the supervised text."""

    name: Literal["coord_reg"] = Field(description="distributions at coordinate slots")
    config: CoordRegConfig = Field(description="all its keys")

    metrics: ClassVar[LossMetrics] = {
        "coord": {
            "coord_ce": "cross-entropy of the nearest bin",
            "coord_soft_ce": "cross-entropy against a Gaussian around the bin",
            "coord_w1": "W1 distance to that Gaussian",
            "coord_gate": "`-log` of the probability of coordinate tokens, at coordinates",
            "text_gate": "`-log` of the probability of other tokens, at text",
        }
    }

    @property
    def teaches(self) -> bool:
        own = self.config
        slots = own.coord_ce_weight + own.soft_ce_weight + own.w1_weight + own.coord_gate_weight
        return slots + own.text_gate_weight > 0

    @property
    def reads_last_text(self) -> bool:
        return self.config.text_gate_weight > 0

    @property
    def gate_temperature(self) -> float | None:
        return self.config.temperature

    def conflicts(self, modules: Sequence[Objective]) -> Iterator[Refusal]:
        """Yield an error for `text_gate` in a channel without supervised text (LOSS-04)."""
        weight = self.config.text_gate_weight
        text = {c for m in modules if m.reads("text") for c in m.channels}
        if weight > 0 and (lost := sorted(set(self.channels) - text)):
            yield Refusal(
                f"{weight} in channel {lost[0]}, in which no token_ce supervises text",
                "Set it to 0, or list the channel in token_ce",
                "config.text_gate_weight",
            )

    def terms(self, stats: ForwardStats, selection: Selection) -> Iterator[Term]:
        from learner.objectives.numerics import coord_gate, coord_log_probs, text_gate

        config, totals, final = self.config, selection.totals, stats.final
        if len(selection.slot_rows):
            bins = selection.slot_bins
            log_probs = coord_log_probs(final.slot_coord_logits, config.temperature)
            values: list[tuple[str, float, Tensor]] = []
            if config.coord_ce_weight > 0:
                hard = -log_probs.gather(1, bins.round().long()[:, None]).squeeze(1)
                values.append(("coord_ce", config.coord_ce_weight, hard))
            if config.soft_ce_weight > 0 or config.w1_weight > 0:
                target = soft_targets(bins, config.target_sigma, config.target_truncate)
                if config.soft_ce_weight > 0:
                    soft = -(target * log_probs).sum(-1)
                    values.append(("coord_soft_ce", config.soft_ce_weight, soft))
                if config.w1_weight > 0:
                    distance = wasserstein1(log_probs.exp(), target)
                    values.append(("coord_w1", config.w1_weight, distance))
            if config.coord_gate_weight > 0:
                gate = coord_gate(final.slot_lse, final.slot_coord_logits, config.temperature)
                values.append(("coord_gate", config.coord_gate_weight, gate))
            for name, weight, value in values:
                yield Term(name, "coord", weight * value.sum() / totals.slots)
        if config.text_gate_weight > 0 and len(selection.text_rows):
            leak = text_gate(final.text_mass).sum()
            yield Term("text_gate", "coord", config.text_gate_weight * leak / totals.text)


def soft_targets(bins: Tensor, sigma: float, truncate: int | None) -> Tensor:
    """Return `q(k)` proportional to `exp(-((k - t)/sigma)^2 / 2)`, (K, 1000); rows sum to 1.

    bins: (K,) targets t in [0, 999]. truncate: q is 0 farther than this from t; None: nowhere.
    """
    import torch

    grid = torch.arange(COORD_BINS, device=bins.device, dtype=torch.float32)
    offset = (grid[None, :] - bins[:, None]).abs()
    exponent = -0.5 * (offset / sigma).square()
    if truncate is not None:
        exponent = exponent.masked_fill(offset > truncate, -torch.inf)
    return exponent.softmax(dim=1)


def wasserstein1(probs: Tensor, targets: Tensor) -> Tensor:
    """Return `sum |CDF_p - CDF_q| / 999` per row; (K, 1000) x 2 -> (K,) in [0, 1]."""
    return (probs.cumsum(-1) - targets.cumsum(-1)).abs().sum(-1) / (COORD_BINS - 1)
