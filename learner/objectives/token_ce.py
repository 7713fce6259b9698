"""`token_ce`: weighted cross-entropy on supervised non-coordinate tokens (LOSS-01)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.objectives.objective import LossMetrics, Objective, Term, Weight
from learner.types import Channel, Role
from shared_contracts.strict_model import StrictModel

if TYPE_CHECKING:
    from torch import Tensor

    from learner.objectives.logit_stats import ForwardStats, Selection, Supervision

_STRUCTURE = "cross-entropy of structure and closure"


class TokenCEConfig(StrictModel):
    """Weights of a target's tokens in `token_ce`, by their role (LOSS-01)."""

    desc_ce_weight: Weight = Field(description="channel A: weight of description tokens")
    rollout_fn_desc_weight: Weight = Field(
        description="channel B: weight of the description tokens of appended objects"
    )
    rollout_matched_prefix_struct_weight: Weight = Field(
        description="channel B: weight of the structure tokens of matched objects"
    )
    self_context_struct_ce_weight: Weight = Field(
        description="channel A: weight of structure tokens in the last of several iterations"
    )
    rollout_drop_invalid_struct_ce_multiplier: float = Field(
        default=1.0,
        ge=1,
        le=4,
        description="channel B: scales structure weights of samples with dropped objects",
    )


class TokenCEModule(Objective):
    """`sum(w * CE) / sum(w)`, logged as its structure and its description part."""

    name: Literal["token_ce"] = Field(description="cross-entropy of text tokens")
    config: TokenCEConfig = Field(description="all its keys")

    metrics: ClassVar[LossMetrics] = {
        "text": {"struct_ce": _STRUCTURE, "desc_ce": "cross-entropy of descriptions"},
        "context_text": {"struct_ce": _STRUCTURE},
    }

    @property
    def learns_from_last(self) -> bool:
        return self.config.self_context_struct_ce_weight > 0

    @property
    def reads_last_text(self) -> bool:
        return self.learns_from_last

    def text_weights(self, row: Supervision, channel: Channel) -> Tensor:
        """In channel A all objects have the appended roles."""
        import torch

        config = self.config
        table = torch.zeros(len(Role))
        table[Role.MATCHED_STRUCTURE] = config.rollout_matched_prefix_struct_weight
        table[[Role.APPENDED_STRUCTURE, Role.CLOSURE]] = 1.0
        table[Role.APPENDED_DESC] = (
            config.desc_ce_weight if channel == "A" else config.rollout_fn_desc_weight
        )
        weights = table.to(row.roles.device)[row.roles.long()]
        is_matched, is_appended = (
            row.roles == role for role in (Role.MATCHED_STRUCTURE, Role.APPENDED_STRUCTURE)
        )
        multiplier = config.rollout_drop_invalid_struct_ce_multiplier
        scaled = (is_matched | is_appended) & row.has_dropped
        return torch.where(scaled, weights * multiplier, weights)

    def terms(self, stats: ForwardStats, selection: Selection) -> Iterator[Term]:
        from learner.objectives.logit_stats import is_description

        is_desc = is_description(selection.text_roles)
        weighted = selection.text_weights * stats.anchor.text_nll / selection.totals.text_weight
        for name, part in {"struct_ce": weighted[~is_desc], "desc_ce": weighted[is_desc]}.items():
            if len(part):
                yield Term(name, "text", part.sum())
        if stats.final is stats.anchor or not self.learns_from_last:
            return
        last = (selection.text_weights * stats.final.text_nll)[~is_desc]
        if len(last):
            mean = last.sum() / selection.totals.struct_weight
            weight = self.config.self_context_struct_ce_weight
            yield Term("struct_ce", "context_text", weight * mean)
