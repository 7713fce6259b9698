"""Channel B: training on the model's own answers, corrected (CHB-01).

    Sample -> RolloutOutput -> ParsedRollout -> MatchResult -> Target -> Segment
    ... Pack -> one forward -> Readings

Generation is never packed; nothing of an answer is repaired, and every ground truth that
was not matched is appended.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from learner.channels.encoding import Encoding
from learner.config.rollout_matching import MatchingConfig
from learner.losses.reading import Reader, Readings
from learner.matching import match_objects
from learner.model.packed_forward import Pack, Segment, packed_logits
from learner.parsing import parse_rollout
from learner.rollout.prompt_check import check_prompt_ids
from learner.targets import TargetUnreadable, build_target
from learner.types import (
    GroundTruthObject,
    MatchResult,
    ParsedRollout,
    RolloutOutput,
    Sample,
    Target,
)

_B = "stage2_ab/channel_b"


@dataclass
class RolloutStats:
    """Counts over the rollouts of one step."""

    rollouts: int = 0
    truncated: int = 0
    invalid: int = 0
    closure_dropped: int = 0
    repeat_terminated: int = 0
    ground_truths: int = 0
    valid: int = 0
    matched: int = 0
    false_positives: int = 0
    gated: int = 0
    appended: int = 0
    drop_reasons: Counter[str] = field(default_factory=Counter)
    new_tokens: list[int] = field(default_factory=list)

    def add(self, rollout: RolloutOutput, parsed: ParsedRollout, match: MatchResult) -> None:
        self.rollouts += 1
        self.truncated += parsed.truncated
        self.invalid += parsed.invalid_rollout
        self.repeat_terminated += rollout.repeat_terminated
        self.ground_truths += len(match.pairs) + len(match.false_negatives)
        self.valid += len(parsed.objects)
        self.matched += len(match.pairs)
        self.false_positives += len(match.false_positives)
        self.gated += match.gated
        self.appended += len(match.false_negatives)
        self.drop_reasons.update(reason for _, reason in parsed.dropped)
        self.new_tokens.append(len(rollout.response_token_ids))

    def metrics(self) -> dict[str, float]:
        """The step's rollout metrics (MET-02)."""
        values: dict[str, float] = {
            "rollout/parse_truncated_rate": self.truncated / max(self.rollouts, 1),
            "rollout/parse_dropped_invalid": self.drop_reasons.total(),
            "rollout/gen_new_tokens_mean": float(np.mean(self.new_tokens or [0])),
            "rollout/gen_new_tokens_p99": float(np.percentile(self.new_tokens or [0], 99)),
            "rollout/repeat_terminate_triggered_sequences": self.repeat_terminated,
            f"{_B}/invalid_rollout": self.invalid,
            f"{_B}/N_valid_pred": self.valid,
            f"{_B}/N_drop_invalid": self.drop_reasons.total(),
            f"{_B}/matched": self.matched,
            f"{_B}/false_positives": self.false_positives,
            f"{_B}/gated": self.gated,
            f"{_B}/fn_appended": self.appended,
            f"{_B}/match_rate": self.matched / max(self.ground_truths, 1),
            f"{_B}/closure_supervision/N_drop": self.closure_dropped,
        }
        values |= {f"{_B}/strict_drop/{why}": n for why, n in self.drop_reasons.items()}
        return values


class ChannelB:
    """Turns samples and their rollouts into segments, and forwards each pack of them once.

    allow_poly: false in the two-channel variant, where polygons are dropped.
    """

    def __init__(self, encoding: Encoding, matching: MatchingConfig, *, allow_poly: bool) -> None:
        self._encoding = encoding
        self._matching = matching
        self._allow_poly = allow_poly

    def segments(
        self, samples: Sequence[Sample], rollouts: Sequence[RolloutOutput]
    ) -> tuple[list[Segment], RolloutStats]:
        """Segments of the samples that can be supervised, and what was counted."""
        stats = RolloutStats()
        segments = []
        for sample, rollout in zip(samples, rollouts, strict=True):
            if (segment := self._segment(sample, rollout, stats)) is not None:
                segments.append(segment)
        return segments, stats

    def readings(self, model: nn.Module, pack: Pack, reader: Reader) -> Readings:
        """Of the one forward of a pack (RES-08)."""
        reading = reader.anchor(packed_logits(model, pack))
        return Readings(reading, reading)

    def target(
        self, parsed: ParsedRollout, ground_truth: Sequence[GroundTruthObject], match: MatchResult
    ) -> Target:
        """`Y_train`; raises `TargetUnreadable`."""
        own = self._encoding
        return build_target(
            parsed, ground_truth, match, own.tokenizer, own.field_order, matching=self._matching
        )

    def _segment(
        self, sample: Sample, rollout: RolloutOutput, stats: RolloutStats
    ) -> Segment | None:
        own = self._encoding
        prompt = own.prompt(sample)
        check_prompt_ids(
            sample.sample_id, prompt.ids.tolist(), rollout.prompt_token_ids, own.tokenizer
        )
        parsed = parse_rollout(
            rollout.response_token_ids, own.tokenizer, allow_poly=self._allow_poly
        )
        match = match_objects(parsed.objects, sample.objects, self._matching)
        stats.add(rollout, parsed, match)
        try:
            target = self.target(parsed, sample.objects, match)
        except TargetUnreadable:
            stats.closure_dropped += 1
            return None
        return own.segment(sample, prompt, target, has_dropped=bool(parsed.dropped))
