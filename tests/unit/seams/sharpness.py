"""A throw-away objective: entropy of the coordinate distributions, with its config and metric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.objectives.objective import LossMetrics, Objective, Term, Weight
from shared_contracts.strict_model import StrictModel

if TYPE_CHECKING:
    from learner.objectives.logit_stats import ForwardStats, Selection


class SharpnessConfig(StrictModel):
    entropy_weight: Weight = Field(description="of the entropy in nats")


class SharpnessModule(Objective):
    """Mean entropy over the supervised slots."""

    name: Literal["sharpness"] = Field(description="entropy of coordinate distributions")
    config: SharpnessConfig = Field(description="all its keys")

    metrics: ClassVar[LossMetrics] = {"coord": {"sharp_entropy": "entropy over the bins"}}

    def terms(self, stats: ForwardStats, selection: Selection) -> Iterator[Term]:
        from learner.objectives.numerics import coord_log_probs

        if len(selection.slot_rows):
            log_probs = coord_log_probs(stats.final.slot_coord_logits)
            entropy = -(log_probs.exp() * log_probs).sum() / selection.totals.slots
            yield Term("sharp_entropy", "coord", self.config.entropy_weight * entropy)
