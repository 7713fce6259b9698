"""Channel A: teacher forcing on the ground-truth answer, and self-context over it (CHA-01).

Sample -> build_ground_truth_target -> Segment ... Pack -> SelfContext -> Readings
"""

from collections.abc import Sequence

from torch import nn

from learner.channels.encoding import Encoding
from learner.losses.reading import Reader, Readings
from learner.model.packed_forward import Pack, Segment
from learner.model.self_context import SelfContext
from learner.targets import TargetUnreadable, build_ground_truth_target
from learner.types import Sample
from shared_contracts.errors import ContractError

_TEACHER_FORCED = SelfContext()


class ChannelA:
    """Turns samples into segments whose target is the whole annotation, and reads them back."""

    def __init__(self, encoding: Encoding, context: SelfContext = _TEACHER_FORCED) -> None:
        self._encoding = encoding
        self._context = context

    def segments(self, samples: Sequence[Sample]) -> list[Segment]:
        return [self._segment(sample) for sample in samples]

    def readings(self, model: nn.Module, pack: Pack, reader: Reader) -> Readings:
        """The first and the last of the pack's forwards."""
        embedding = self._encoding.inner.get_input_embeddings()
        return self._context.readings(model, embedding, pack, reader)

    def _segment(self, sample: Sample) -> Segment:
        own = self._encoding
        try:
            target = build_ground_truth_target(sample.objects, own.tokenizer, own.field_order)
        except TargetUnreadable as error:
            raise ContractError(
                sample.sample_id,
                f"its annotation cannot be read back once it is written: {error}",
                "Mend its descriptions; `learner data check` names what is wrong with them",
            ) from error
        return own.segment(sample, own.prompt(sample), target, has_dropped=False)
