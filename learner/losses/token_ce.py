"""`token_ce`: weighted cross-entropy on supervised non-coordinate tokens (LOSS-01)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.config.pipeline import TokenCEConfig
from learner.losses.batch import LossBatch, Term
from learner.losses.fences import fenced
from learner.types import Channel, Role

_STRUCTURE = (Role.MATCHED_STRUCTURE, Role.APPENDED_STRUCTURE)


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
    structure = torch.zeros_like(has_dropped)
    for role in _STRUCTURE:
        structure |= roles == role
    multiplier = config.rollout_drop_invalid_struct_ce_multiplier
    return torch.where(structure & has_dropped, weights * multiplier, weights)


def token_ce(batch: LossBatch) -> list[Term]:
    """`sum(w * CE) / sum(w)`, reported as its structure and its description share."""
    if batch.text_targets.numel() == 0:
        zero = batch.text_logits.sum() * 0.0
        return [Term("struct_ce", "text", zero)]
    nll = F.cross_entropy(fenced(batch.text_logits), batch.text_targets, reduction="none")
    share = batch.text_weights * nll / batch.text_weights.sum()
    is_desc = batch.text_roles == Role.APPENDED_DESC
    return [
        Term("struct_ce", "text", share[~is_desc].sum()),
        Term("desc_ce", "text", share[is_desc].sum()),
    ]
