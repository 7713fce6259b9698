"""What channel B makes of an answer, before it is a segment (CHB-01). Imports no torch.

RolloutOutput -> ParsedRollout -> MatchResult -> Target
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.config.rollout_matching import MatchingConfig
from learner.matching import match_objects
from learner.parsing import parse_rollout
from learner.rollout_log import Judged
from learner.targets import TargetUnreadable, build_target
from learner.tokens import Tokenizer
from learner.types import (
    FieldOrder,
    GroundTruthObject,
    MatchResult,
    ParsedRollout,
    RolloutOutput,
    Sample,
    Target,
)

# Raises `TargetUnreadable`.
TargetOf = Callable[[ParsedRollout, Sequence[GroundTruthObject], MatchResult], Target]


@dataclass(frozen=True)
class Judge:
    """allow_poly: false in the two-channel variant, where polygons are dropped."""

    tokenizer: Tokenizer
    field_order: FieldOrder
    matching: MatchingConfig
    allow_poly: bool

    def __call__(
        self, sample: Sample, rollout: RolloutOutput, target_of: TargetOf | None = None
    ) -> Judged:
        """target_of: in the place of `target`."""
        parsed = parse_rollout(
            rollout.response_token_ids, self.tokenizer, allow_poly=self.allow_poly
        )
        match = match_objects(parsed.objects, sample.objects, self.matching)
        try:
            target = (target_of or self.target)(parsed, sample.objects, match)
        except TargetUnreadable as error:
            return Judged(sample, rollout, parsed, match, None, str(error))
        return Judged(sample, rollout, parsed, match, target)

    def target(
        self, parsed: ParsedRollout, ground_truth: Sequence[GroundTruthObject], match: MatchResult
    ) -> Target:
        """`Y_train`; raises `TargetUnreadable`."""
        return build_target(
            parsed, ground_truth, match, self.tokenizer, self.field_order, matching=self.matching
        )
