"""`policy_gradient` over one row against the plain formula in float64 (GROUP-03)."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.objectives.logit_stats import ForwardStats, Supervision
from learner.objectives.objective import Objective
from learner.objectives.pipeline import PackLoss, Pipeline
from learner.objectives.policy_gradient import PolicyGradientConfig, PolicyGradientModule
from tests.unit.loss_rows import COORD_IDS, answer_row, bbox_geo, declared, logits_for, token_ce
from tests.unit.packed_logits import as_given
from tests.unit.plain_losses import Plain

pytestmark = pytest.mark.req("GROUP-03")

KEPT = (2, 3, 5, 8, 9, 10)
KEYS = ("loss/B_answer/policy_gradient", "loss/B_answer/kl")


def policy_gradient(kl_weight: float = 0.0, weight: float = 0.8) -> PolicyGradientModule:
    config = PolicyGradientConfig(clip_low=0.2, clip_high=0.3, kl_weight=kl_weight)
    return PolicyGradientModule(
        name="policy_gradient", enabled=True, weight=weight, channels=("B",), config=config
    )


def row_with(
    logits: Tensor, log_ratios: Sequence[float], advantages: Sequence[float]
) -> Supervision:
    """A row whose kept tokens have these ratios, in nats, and advantages."""
    row = answer_row(1)
    log_p = logits.log_softmax(-1)
    kept = [log_p[p - 1, row.input_ids[p]].item() for p in KEPT]
    return replace(
        row,
        kept_positions=torch.tensor(KEPT),
        kept_logprobs=torch.tensor(kept, dtype=torch.float64)
        - torch.tensor(log_ratios, dtype=torch.float64),
        kept_advantages=torch.tensor(advantages, dtype=torch.float64),
    )


def loss_of(
    row: Supervision,
    logits: Tensor,
    module: PolicyGradientModule,
    start: Tensor | None = None,
    others: Sequence[Objective] = (token_ce(), bbox_geo()),
) -> PackLoss:
    pipeline = Pipeline(declared(module, *others), COORD_IDS)
    selection = pipeline.select(row, "B")
    reader = pipeline.reader(selection)
    stats = reader.anchor(as_given(logits))
    start_nll = None if start is None else reader.kept(as_given(start)).detach()
    return pipeline(ForwardStats(stats, stats, start_nll), selection, "B")


def gradient_of(
    row: Supervision, logits: Tensor, module: PolicyGradientModule, start: Tensor | None = None
) -> Tensor:
    """The gradient of the module without others."""
    leaf = logits.clone().requires_grad_()
    loss_of(row, leaf, module, start, others=()).total.backward()
    assert leaf.grad is not None
    return leaf.grad


# Inside of both bounds, above with both signs, below with both signs, and without advantage.
RATIOS = (0.1, 0.7, 0.6, -0.5, -0.9, 0.3)
ADVANTAGES = (1.0, 0.5, -2.0, 1.5, -0.7, 0.0)


@pytest.mark.parametrize("kl_weight", [0.0, 0.4])
def test_value_and_gradient_are_those_of_the_plain_formula(kl_weight: float) -> None:
    row = answer_row(1)
    logits, start = logits_for(row, 1), logits_for(row, 2) if kl_weight else None
    row, module = row_with(logits, RATIOS, ADVANTAGES), policy_gradient(kl_weight)
    found = loss_of(row, logits, module, start)
    plain = Plain(declared(module, token_ce(), bbox_geo()), "B", row, COORD_IDS, start)
    expected = plain.atoms([logits])
    own = [key for key in KEYS if key in expected]
    assert len(own) == (2 if kl_weight else 1)
    for key in own:
        assert found.atoms[key] == pytest.approx(expected[key], rel=1e-9), key
    assert found.total.item() == pytest.approx(sum(expected.values()), rel=1e-6)

    alone = Plain(declared(module), "B", row, COORD_IDS, start)
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).double()
    slope = alone.slope([logits], [direction])
    found_slope = (gradient_of(row, logits, module, start) * direction).sum().item()
    assert found_slope == pytest.approx(slope, rel=1e-5)


def test_monitors_count_clipped_tokens_and_estimate_entropy_and_divergence() -> None:
    row = answer_row(1)
    logits, start = logits_for(row, 1), logits_for(row, 2)
    row = row_with(logits, RATIOS, ADVANTAGES)
    found = loss_of(row, logits, policy_gradient(kl_weight=1.0, weight=1.0), start)
    plain = Plain(declared(policy_gradient(1.0)), "B", row, COORD_IDS, start)
    # Above with a positive advantage, below with a negative one.
    assert found.tokens["policy_gradient/clip_fraction"] == (2.0, 6.0)
    ratios = sum(map(math.exp, RATIOS))
    assert found.tokens["policy_gradient/ratio_mean"] == pytest.approx((ratios, 6))
    entropy = -sum(plain.log_p(logits, position) for position in KEPT)
    assert found.tokens["policy_gradient/entropy"] == pytest.approx((entropy, 6))
    divergence, tokens = found.tokens["policy_gradient/kl"]
    assert divergence / tokens == pytest.approx(found.atoms["loss/B_answer/kl"])


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_no_ratio_makes_a_loss_or_a_gradient_nan(log_ratio: float) -> None:
    logits = logits_for(answer_row(1), 7)
    row = row_with(logits, [log_ratio] * 6, ADVANTAGES)
    assert loss_of(row, logits, policy_gradient()).total.isfinite()
    assert gradient_of(row, logits, policy_gradient()).isfinite().all()


def test_kept_tokens_have_a_gradient_only_where_they_are_trained_on() -> None:
    logits = logits_for(answer_row(1), 8)
    row = row_with(logits, RATIOS, ADVANTAGES)
    for modules, learns in (([token_ce()], False), ([token_ce(), policy_gradient()], True)):
        pipeline = Pipeline(declared(*modules), COORD_IDS)
        selection = pipeline.select(row, "B")
        stats = pipeline.reader(selection).anchor(as_given(logits.clone().requires_grad_()))
        assert stats.kept_nll.requires_grad == learns
        rows = len(selection.text_rows) + len(selection.slot_rows)
        assert selection.head_rows == rows + (len(KEPT) if learns else 0)
