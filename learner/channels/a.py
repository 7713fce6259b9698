"""Channel A: teacher forcing on the ground-truth answer.

Sample -> build_ground_truth_target -> Segment
"""

from collections.abc import Callable, Sequence

from learner.model.packed_forward import EncodedPrompt, RopeIndex, Segment, make_segment
from learner.targets import build_ground_truth_target
from learner.tokens import Tokenizer
from learner.types import FieldOrder, Sample


class ChannelA:
    """Turns samples into segments whose target is the whole annotation."""

    def __init__(
        self,
        inner: RopeIndex,
        encode: Callable[[Sample], EncodedPrompt],
        tokenizer: Tokenizer,
        field_order: FieldOrder,
    ) -> None:
        self._inner = inner
        self._encode = encode
        self._tokenizer = tokenizer
        self._field_order = field_order

    def segments(self, samples: Sequence[Sample]) -> list[Segment]:
        return [self._segment(sample) for sample in samples]

    def _segment(self, sample: Sample) -> Segment:
        target = build_ground_truth_target(sample.objects, self._tokenizer, self._field_order)
        prompt = self._encode(sample)
        return make_segment(self._inner, sample.sample_id, prompt, target, has_dropped=False)
