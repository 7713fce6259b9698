"""`token_ce`: weighted cross-entropy on supervised non-coordinate tokens (LOSS-01)."""

import torch
from torch import Tensor

from learner.config.pipeline import TokenCEConfig
from learner.losses.reading import Reading
from learner.losses.supervision import Selection, is_description
from learner.losses.term import Term
from learner.types import Channel, Role


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
    table = torch.zeros(len(Role))
    for role, weight in role_weights(config, channel).items():
        table[role] = weight
    weights = table.to(roles.device)[roles.long()]
    structure = (roles == Role.MATCHED_STRUCTURE) | (roles == Role.APPENDED_STRUCTURE)
    multiplier = config.rollout_drop_invalid_struct_ce_multiplier
    return torch.where(structure & has_dropped, weights * multiplier, weights)


def token_ce(reading: Reading, selection: Selection) -> list[Term]:
    """`sum(w * CE) / sum(w)`, reported as its structure and its description share."""
    share = selection.text_weights * reading.text_nll / selection.totals.text_weight
    is_desc = is_description(selection.text_roles)
    parts = {"struct_ce": share[~is_desc], "desc_ce": share[is_desc]}
    return [Term(name, "text", part.sum()) for name, part in parts.items() if len(part)]


def self_context_ce(reading: Reading, selection: Selection, config: TokenCEConfig) -> list[Term]:
    """CE of structure and closure in the last of several forwards of channel A."""
    is_struct = ~is_description(selection.text_roles)
    weighted = (selection.text_weights * reading.text_nll)[is_struct]
    if not len(weighted):
        return []
    mean = weighted.sum() / selection.totals.struct_weight
    return [Term("struct_ce", "context_text", config.self_context_struct_ce_weight * mean)]
