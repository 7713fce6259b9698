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
    """What the tokens of a target weigh in `token_ce`, by their role (LOSS-01)."""

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
    """`sum(w * CE) / sum(w)`, reported as its structure and its description part."""

    name: Literal["token_ce"] = Field(description="cross-entropy of text tokens")
    config: TokenCEConfig = Field(description="all its keys")

    metrics: ClassVar[LossMetrics] = {
        "text": {"struct_ce": _STRUCTURE, "desc_ce": "cross-entropy of descriptions"},
        "context_text": {"struct_ce": _STRUCTURE},
    }
    supervises_text: ClassVar[bool] = True

    @property
    def learns_from_last(self) -> bool:
        return self.config.self_context_struct_ce_weight > 0

    @property
    def reads_last_text(self) -> bool:
        return self.learns_from_last

    def text_weights(self, row: Supervision, channel: Channel) -> Tensor:
        return token_weights(row.roles, row.has_dropped, self.config, channel)

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


def role_weights(config: TokenCEConfig, channel: Channel) -> dict[Role, float]:
    """Cross-entropy weight of each role in a channel (LOSS-01).

    In channel A every object is ground truth, so the appended roles carry its weights.
    """
    desc = config.desc_ce_weight if channel == "A" else config.rollout_fn_desc_weight
    return {
        Role.PROMPT: 0.0,
        Role.MATCHED_STRUCTURE: config.rollout_matched_prefix_struct_weight,
        Role.MATCHED_DESC: 0.0,
        Role.FALSE_POSITIVE: 0.0,
        Role.APPENDED_STRUCTURE: 1.0,
        Role.APPENDED_DESC: desc,
        Role.COORD: 0.0,
        Role.CLOSURE: 1.0,
    }


def token_weights(
    roles: Tensor, has_dropped: Tensor, config: TokenCEConfig, channel: Channel
) -> Tensor:
    """Weights of tokens from their roles; (L,), (L,) bool -> (L,) float.

    has_dropped: true where the token's sample lost an invalid object, whose structure
        weights are multiplied by `rollout_drop_invalid_struct_ce_multiplier`.
    """
    import torch

    table = torch.zeros(len(Role))
    for role, weight in role_weights(config, channel).items():
        table[role] = weight
    weights = table.to(roles.device)[roles.long()]
    structure = (roles == Role.MATCHED_STRUCTURE) | (roles == Role.APPENDED_STRUCTURE)
    multiplier = config.rollout_drop_invalid_struct_ce_multiplier
    return torch.where(structure & has_dropped, weights * multiplier, weights)
