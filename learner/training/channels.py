"""Samples to segments in both channels; the channel of a step, and the loss of a pack.

    A  Sample -> build_ground_truth_target -> Segment                                   (CHA-01)
    B  Sample -> RolloutOutput -> ParsedRollout -> MatchResult -> Target -> Segment     (CHB-01)

Generation is never packed. Answers are not repaired. All unmatched ground truths are appended.
`VARIANTS` of `learner.objectives` names the recipe of each trainer variant. `Recipe` has them
all: channels A and B by `b_ratio`, A with self-context (CHA-01); channel B alone (RES-02); and
groups of answers in channel B (GROUP-01).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pkgutil import resolve_name

from torch import nn
from transformers import PreTrainedModel

from learner.config.schema import Config
from learner.models.flops import Arithmetic
from learner.models.load import LoadedModel
from learner.models.packed_forward import StartModel, packed_forward
from learner.models.packs import Pack, Segment, make_segment
from learner.models.prompts import EncodedPrompt, PromptEncoder
from learner.models.self_context import SelfContext
from learner.objectives import VARIANTS
from learner.objectives.logit_stats import ForwardStats, Reader
from learner.objectives.pipeline import PackLoss, Pipeline
from learner.rollout.answers import check_prompt_ids
from learner.stages.formats import AnswerFormat, answer_format
from learner.stages.formats.coord_json import COORD_JSON
from learner.stages.rewards import token_advantages
from learner.stages.schedule import channel_for_step
from learner.stages.targets import (
    TargetUnreadable,
    build_ground_truth_target,
    kept_logprobs,
    run_stages,
)
from learner.stages.tokens import Tokenizer
from learner.types import AssessedRollout, Channel, FieldOrder, RolloutOutput, Sample
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
    """Training on corrected answers of the model; one forward for each pack (RES-08)."""

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


class Recipe:
    """Both channels of a run, the channel of each step, and the loss of a pack.

    A run without channel A still uses its segments for replays (DDP-02).
    """

    def __init__(
        self, config: Config, channel_a: ChannelA, channel_b: ChannelB, objective: Pipeline
    ) -> None:
        self.config = config
        self.channel_a = channel_a
        self.channel_b = channel_b
        self.objective = objective
        self._arithmetic: Arithmetic | None = None

    def channel(self, step: int) -> Channel:
        """Return the channel of step `step`, counted from 0 (STEP-01)."""
        return channel_for_step(step, self.config.b_ratio)

    def loss(
        self, model: nn.Module, pack: Pack, channel: Channel, answer_tokens: float | None = None
    ) -> PackLoss:
        """Return the loss of one pack, of all its forwards. answer_tokens: as in `Totals`."""
        selection = self.objective.select(pack.supervision, channel)
        if answer_tokens is not None:
            selection = selection.over(answer_tokens)
        own = self.channel_a if channel == "A" else self.channel_b
        stats = own.forward_stats(model, pack, self.objective.reader(selection))
        return self.objective(stats, selection, channel)

    def flops(self, model: nn.Module, pack: Pack, channel: Channel) -> float:
        """Return the FLOPs of all forwards and backwards of a pack."""
        if self._arithmetic is None:
            self._arithmetic = Arithmetic.of(model, self.channel_a.encoding.inner.config)
        rows = self.objective.select(pack.supervision, channel).head_rows
        forward, both = self._arithmetic.of_pack(pack, rows)
        context = self.channel_a.context if channel == "A" else SelfContext()
        recorded = context.recorded
        return recorded * both + (context.iterations - recorded) * forward


def recipe_of(config: Config, loaded: LoadedModel, start: StartModel | None = None) -> Recipe:
    """Build the recipe of `custom.trainer_variant`. start: of a run that `needs_start`."""
    kind: type[Recipe] = resolve_name(VARIANTS[config.custom.trainer_variant].recipe)
    prompt = PromptEncoder(loaded.processor, config.template.prompt, config.template.system)
    fields, answers = config.custom.object_field_order, answer_format(config)
    encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, fields, answers)
    context, own = SelfContext(), config.stage2_ab
    if own is not None:
        context = SelfContext(own.n_softctx_iter, own.coord_ctx_embed_mode, own.softctx_grad_mode)
    return kind(
        config,
        ChannelA(encoding, context),
        ChannelB(encoding, config, start),
        Pipeline(config.pipeline, loaded.vocab.ids),
    )
