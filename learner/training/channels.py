"""Samples to segments in both channels, and the forward of a pack of them.

    A  Sample -> build_ground_truth_target -> Segment                                   (CHA-01)
    B  Sample -> RolloutOutput -> ParsedRollout -> MatchResult -> Target -> Segment     (CHB-01)

Generation is never packed. Answers are not repaired. All unmatched ground truths are appended.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from learner.config.schema import Config
from learner.models.packed_forward import StartModel, packed_forward
from learner.models.packs import Pack, Segment, make_segment
from learner.models.prompts import EncodedPrompt, PromptEncoder
from learner.models.self_context import SelfContext
from learner.objectives.logit_stats import ForwardStats, Reader
from learner.rollout.answers import check_prompt_ids
from learner.stages.formats import AnswerFormat
from learner.stages.formats.coord_json import COORD_JSON
from learner.stages.rewards import token_advantages
from learner.stages.targets import (
    TargetUnreadable,
    build_ground_truth_target,
    kept_logprobs,
    run_stages,
)
from learner.stages.tokens import Tokenizer
from learner.types import AssessedRollout, FieldOrder, RolloutOutput, Sample
from shared_contracts.errors import ContractError

_TEACHER_FORCED = SelfContext()


@dataclass(frozen=True)
class Encoding:
    """inner: the multimodal module of the model. prompt: encodes a sample's image and question."""

    inner: PreTrainedModel
    prompt: PromptEncoder
    tokenizer: Tokenizer
    field_order: FieldOrder
    answers: AnswerFormat = COORD_JSON


class ChannelA:
    """Teacher forcing on the ground-truth answer, and self-context over it."""

    def __init__(self, encoding: Encoding, context: SelfContext = _TEACHER_FORCED) -> None:
        self.encoding = encoding
        self.context = context

    def segments(self, samples: Sequence[Sample]) -> list[Segment]:
        with self.encoding.prompt.ahead(samples):
            return [self._segment(sample) for sample in samples]

    def forward_stats(self, model: nn.Module, pack: Pack, reader: Reader) -> ForwardStats:
        """Return statistics of the first and the last of the forwards of a pack."""
        return self.context.forward_stats(model, pack, reader)

    def _segment(self, sample: Sample) -> Segment:
        own = self.encoding
        try:
            target = build_ground_truth_target(
                sample.objects, own.tokenizer, own.field_order, own.answers
            )
        except TargetUnreadable as error:
            raise ContractError(
                sample.sample_id,
                f"its annotation, written as an answer, cannot be parsed: {error}",
                "Correct its descriptions; `learner data check` names their faults",
            ) from error
        prompt = own.prompt(sample)
        return make_segment(own.inner, sample.sample_id, prompt, target, has_dropped=False)


class ChannelB:
    """Training on corrected answers of the model; one forward for each pack (RES-08).

    start: the model that the run started from, if a module needs it.
    """

    def __init__(self, encoding: Encoding, config: Config, start: StartModel | None = None) -> None:
        self._encoding = encoding
        self._config = config
        self._start = start
        self.answers_per_sample = config.answers_per_sample

    def ahead(self, samples: Sequence[Sample]) -> AbstractContextManager[None]:
        """Encode the prompts of `samples` in threads, for calls of `segments` in the block."""
        return self._encoding.prompt.ahead(samples)

    def segments(
        self, samples: Sequence[Sample], rollouts: Sequence[RolloutOutput]
    ) -> tuple[list[Segment], list[AssessedRollout]]:
        """Return the segments of the answers that have a target, and all assessed answers.

        samples: one for each answer; each sample `answers_per_sample` times in a row.
        """
        own, prompts = self._encoding, list[EncodedPrompt]()
        for sample, rollout in zip(samples, rollouts, strict=True):
            prompt = own.prompt(sample)
            prompts.append(prompt)
            # The backend and the model's own processor must encode the prompt alike (ROLL-01).
            check_prompt_ids(
                sample.sample_id, prompt.ids.tolist(), rollout.prompt_token_ids, own.tokenizer
            )
        assessed = run_stages(samples, rollouts, own.tokenizer, self._config)
        segments = [
            make_segment(
                own.inner,
                found.sample.sample_id,
                prompt,
                found.target,
                has_dropped=bool(found.parsed.dropped),
                kept_logprobs=(kept := kept_logprobs(found.rollout, found.target)),
                advantages=token_advantages(found, len(kept)),
            )
            for found, prompt in zip(assessed, prompts, strict=True)
            if found.target is not None
        ]
        return segments, assessed

    def forward_stats(self, model: nn.Module, pack: Pack, reader: Reader) -> ForwardStats:
        start_nll = None if self._start is None else self._start.forward(pack, reader.kept)
        stats = packed_forward(model, pack, reader.anchor)
        return ForwardStats(stats, stats, start_nll)
