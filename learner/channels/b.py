"""Channel B: training on the model's own answers, corrected (CHB-01).

    Sample -> RolloutOutput -> ParsedRollout -> MatchResult -> Target -> Segment
    ... Pack -> one forward -> Readings

Generation is never packed; nothing of an answer is repaired, and every ground truth that
was not matched is appended.
"""

from collections.abc import Callable, Sequence

from torch import nn

from learner.channels.encoding import Encoding
from learner.channels.rollout_stats import RolloutStats
from learner.config.rollout_matching import MatchingConfig
from learner.losses.reading import Reader, Readings
from learner.matching import match_objects
from learner.model.packed_forward import Pack, Segment, packed_logits
from learner.parsing import parse_rollout
from learner.rollout.prompt_check import check_prompt_ids
from learner.rollout_log import Judged
from learner.targets import TargetUnreadable, build_target
from learner.types import (
    GroundTruthObject,
    MatchResult,
    ParsedRollout,
    RolloutOutput,
    Sample,
    Target,
)


class ChannelB:
    """Turns samples and their rollouts into segments, and forwards each pack of them once.

    allow_poly: false in the two-channel variant, where polygons are dropped.
    """

    def __init__(self, encoding: Encoding, matching: MatchingConfig, *, allow_poly: bool) -> None:
        self._encoding = encoding
        self._matching = matching
        self._allow_poly = allow_poly

    def segments(
        self,
        samples: Sequence[Sample],
        rollouts: Sequence[RolloutOutput],
        note: Callable[[Judged], None] | None = None,
    ) -> tuple[list[Segment], RolloutStats]:
        """Segments of the samples that can be supervised, and what was counted.

        note: takes what became of each answer, in order.
        """
        stats = RolloutStats()
        segments = []
        for sample, rollout in zip(samples, rollouts, strict=True):
            segment, judged = self._segment(sample, rollout, stats)
            if segment is not None:
                segments.append(segment)
            if note is not None:
                note(judged)
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
    ) -> tuple[Segment | None, Judged]:
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
            return None, Judged(sample, rollout, parsed, match, supervised=False)
        stats.appended += len(target.fn_keys)
        segment = own.segment(sample, prompt, target, has_dropped=bool(parsed.dropped))
        return segment, Judged(sample, rollout, parsed, match, supervised=True)
