"""`policy_gradient`: clipped policy gradient on the answer's tokens (GROUP-03)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.objectives.objective import LossMetrics, Objective, SlotMetrics, Term, Weight
from shared_contracts.strict_model import StrictModel

if TYPE_CHECKING:
    from torch import Tensor

    from learner.objectives.logit_stats import ForwardStats, Selection

# In nats: a larger log ratio counts as 20, without gradient.
LOG_RATIO_LIMIT = 20.0


class PolicyGradientConfig(StrictModel):
    """Bounds of the probability ratio, and the weight of the KL divergence."""

    clip_low: float = Field(
        gt=0, le=1, description="a ratio below 1 less this has no gradient that lowers it"
    )
    clip_high: float = Field(
        gt=0, description="a ratio above 1 plus this has no gradient that raises it"
    )
    kl_weight: Weight = Field(
        description="weight of the KL divergence from the model that the run started from; 0: it "
        "is not computed"
    )


class PolicyGradientModule(Objective):
    """A mean over all kept answer tokens of the step, in all processes."""

    name: Literal["policy_gradient"] = Field(
        description="policy gradient by the rewards of answers; only in stage2_group_relative"
    )
    config: PolicyGradientConfig = Field(description="all its keys")

    metrics: ClassVar[LossMetrics] = {
        "answer": {
            "policy_gradient": "clipped, importance-weighted advantage of answer tokens, negative",
            "kl": "KL divergence from the starting model",
        }
    }
    token_metrics: ClassVar[SlotMetrics] = {
        "clip_fraction": ("1", "answer tokens whose ratio is clipped, without gradient / tokens"),
        "ratio_mean": ("1", "mean ratio of the probabilities by trainer and engine"),
        "entropy": ("nats", "mean `-log p` of the sampled tokens: an estimate of the entropy"),
        "kl": ("nats", "mean estimate of the KL divergence from the starting model"),
    }

    @property
    def reads_start(self) -> bool:
        return self.config.kl_weight > 0

    def terms(self, stats: ForwardStats, selection: Selection) -> Iterator[Term]:
        nll = stats.anchor.kept_nll
        if not len(nll):
            return
        over = selection.totals.answer_tokens
        surrogate, _ = self._surrogate(nll, selection)
        yield Term("policy_gradient", "answer", -surrogate.sum() / over)
        if stats.start_nll is not None:
            kl = start_divergence(nll, stats.start_nll).sum() / over
            yield Term("kl", "answer", self.config.kl_weight * kl)

    def token_sums(self, stats: ForwardStats, selection: Selection) -> dict[str, float]:
        nll = stats.anchor.kept_nll.detach()
        surrogate, free = self._surrogate(nll, selection)
        sums = {
            "clip_fraction": float((surrogate != free).sum()),
            "ratio_mean": float(ratio_of(nll, selection.kept_logprobs).double().sum()),
            "entropy": float(nll.double().sum()),
        }
        if stats.start_nll is not None:
            sums["kl"] = float(start_divergence(nll, stats.start_nll).double().sum())
        return sums

    def _surrogate(self, nll: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
        """Return `min(r A, clip(r) A)` and `r A` of each token, (R,).

        Schulman et al., "Proximal Policy Optimization" (arXiv 1707.06347), with the advantages of
        a group of answers (Shao et al., "DeepSeekMath", arXiv 2402.03300). Two bounds and the mean
        over tokens are those of Yu et al., "DAPO" (arXiv 2503.14476).
        """
        ratio, advantages = ratio_of(nll, selection.kept_logprobs), selection.kept_advantages
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        free = ratio * advantages
        return free.minimum(clipped * advantages), free


def ratio_of(nll: Tensor, logprobs: Tensor) -> Tensor:
    """Return `p / q` of tokens with `-log p` and `log q`, (R,) -> (R,), at most e^20."""
    return (-nll - logprobs).clamp(max=LOG_RATIO_LIMIT).exp()


def start_divergence(nll: Tensor, start_nll: Tensor) -> Tensor:
    """Return `exp(d) - d - 1`, d = log p_start - log p, (R,) -> (R,), >= 0 except for rounding.

    The estimator k3 of KL(p || p_start) for tokens that p has sampled (Schulman, "Approximating KL
    Divergence", 2020). d counts as at most `LOG_RATIO_LIMIT`.
    """
    ahead = (nll - start_nll).clamp(max=LOG_RATIO_LIMIT)
    return ahead.exp() - ahead - 1
