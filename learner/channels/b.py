"""Channel B: training on the model's own answers, corrected (CHB-01).

    Sample -> RolloutOutput -> ParsedRollout -> MatchResult -> Target -> Segment
    ... Pack -> one forward -> Readings

Generation is never packed; nothing of an answer is repaired, and every ground truth that
was not matched is appended.
"""

from collections.abc import Callable, Sequence

from torch import nn

from learner.channels.encoding import Encoding
from learner.channels.judge import Judge
from learner.channels.rollout_stats import RolloutStats
from learner.config.rollout_matching import MatchingConfig
from learner.losses.reading import Reader, Readings
from learner.model.packed_forward import EncodedPrompt, Pack, Segment, packed_logits
from learner.rollout.prompt_check import check_prompt_ids
from learner.rollout_log import Judged
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
        self._judge = Judge(encoding.tokenizer, encoding.field_order, matching, allow_poly)

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
            prompt = self._prompt(sample, rollout)
            judged = self._judge(sample, rollout, self.target)
            stats.add(judged)
            if judged.target is not None:
                segments.append(self._segment(judged, judged.target, prompt))
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
        return self._judge.target(parsed, ground_truth, match)

    def _prompt(self, sample: Sample, rollout: RolloutOutput) -> EncodedPrompt:
        """As the model's own processor has it, and as the backend had it (ROLL-01)."""
        own = self._encoding
        prompt = own.prompt(sample)
        check_prompt_ids(
            sample.sample_id, prompt.ids.tolist(), rollout.prompt_token_ids, own.tokenizer
        )
        return prompt

    def _segment(self, judged: Judged, target: Target, prompt: EncodedPrompt) -> Segment:
        has_dropped = bool(judged.parsed.dropped)
        return self._encoding.segment(judged.sample, prompt, target, has_dropped=has_dropped)
