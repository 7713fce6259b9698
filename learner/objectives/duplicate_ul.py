"""`duplicate_ul`: unlikelihood where a duplicate departs from the target (CLEAN-02)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.objectives.objective import LossMetrics, Objective, Term
from learner.types import COORD_BINS
from shared_contracts.strict_model import StrictModel

if TYPE_CHECKING:
    from torch import Tensor

    from learner.objectives.logit_stats import ForwardStats, Selection

# In nats: a probability above 1 - 1e-6 counts as 1 - 1e-6.
LEAST_NLL = 1e-6


class DuplicateULConfig(StrictModel):
    radius: int | None = Field(
        ge=0,
        lt=COORD_BINS,
        description="in bins: only coordinate tokens count, each together with the bins within "
        "this distance; null: tokens of any kind count, each alone",
    )


class DuplicateULModule(Objective):
    """Mean of `-log(1 - p)` over the tokens with which removed duplicates depart."""

    name: Literal["duplicate_ul"] = Field(
        description="unlikelihood of duplicates; needs `stage2_ab.channel_b.prefix: clean`"
    )
    config: DuplicateULConfig = Field(description="all its keys")

    metrics: ClassVar[LossMetrics] = {
        "departure": {"duplicate_ul": "unlikelihood of tokens that begin a duplicate"}
    }

    @property
    def departure_radius(self) -> int | None:
        return self.config.radius

    def terms(self, stats: ForwardStats, selection: Selection) -> Iterator[Term]:
        nll = stats.anchor.departure_nll
        if len(nll):
            mean = unlikelihood(nll).sum() / selection.totals.departures
            yield Term("duplicate_ul", "departure", mean)


def unlikelihood(nll: Tensor) -> Tensor:
    """Return `-log(1 - p)` of tokens with `-log p`, (U,) -> (U,), in nats.

    Welleck et al., "Neural Text Generation with Unlikelihood Training" (arXiv 1908.04319).
    Below `LEAST_NLL` the value and the slope are those at `LEAST_NLL`.
    """
    held = nll + (nll.clamp(min=LEAST_NLL) - nll).detach()
    return -(-(-held).expm1()).log()
