"""How samples become segments, the same in both channels."""

from collections.abc import Callable
from dataclasses import dataclass

from learner.model.packed_forward import EncodedPrompt, Multimodal, Segment, make_segment
from learner.tokens import Tokenizer
from learner.types import FieldOrder, Sample, Target


@dataclass(frozen=True)
class Encoding:
    """inner: the multimodal module of the model. prompt: encodes a sample's image and question."""

    inner: Multimodal
    prompt: Callable[[Sample], EncodedPrompt]
    tokenizer: Tokenizer
    field_order: FieldOrder

    def segment(
        self, sample: Sample, prompt: EncodedPrompt, target: Target, *, has_dropped: bool
    ) -> Segment:
        return make_segment(self.inner, sample.sample_id, prompt, target, has_dropped)
