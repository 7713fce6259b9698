"""Answers of the log, through the stages that training sends them through."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from learner.async_rollout.parts import Parts
from learner.channels.judge import Judge
from learner.channels.rollout_stats import RolloutStats
from learner.config.schema import Config
from learner.metrics import Payload
from learner.packing import CountedPacking, Place
from learner.rollout_log import Judged, StepAnswer
from learner.tokens import Tokenizer
from learner.types import RolloutOutput


@dataclass(frozen=True)
class RebuiltSegment:
    """A segment without its tensors, as long as they are."""

    sample_id: str
    length: int

    def __len__(self) -> int:
        return self.length


class Rebuilder:
    """Does what a run of `config` did with its answers. tokenizer: of its model."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._judge = Judge(
            tokenizer,
            config.custom.object_field_order,
            config.rollout_matching.matching,
            config.allow_poly,
        )

    def judged(self, answer: StepAnswer) -> Judged:
        """An answer, parsed, matched and made a target."""
        rollout = RolloutOutput(
            prompt_token_ids=answer.prompt_token_ids,
            response_token_ids=answer.response_token_ids,
            text=answer.text,
            finish_reason=answer.finish_reason,
            repeat_terminated=answer.repeat_terminated,
            weights_version=answer.weights_version,
            seed=answer.seed,
        )
        return self._judge(answer.sample, rollout)

    def packed(
        self, answers: Sequence[StepAnswer], judged: Sequence[Judged]
    ) -> CountedPacking[RebuiltSegment]:
        """All answers of one process, packed as they came.

        Raises ContractError where they cannot be.
        """
        config = self._config
        packing = CountedPacking[RebuiltSegment](config.training, config.global_max_length)
        pairs = zip(answers, judged, strict=True)
        rounds = [
            (own[0][0].weights_version[0], [s for _, each in own if (s := segment_of(each))])
            for _, group in groupby(pairs, lambda pair: pair[0].chunk)
            if (own := list(group))
        ]
        if config.rollout_matching.async_rollout.enabled:
            parts = Parts[RebuiltSegment, list[RebuiltSegment]](packing)
            for version, segments in rounds:
                parts.add(version, segments)
            parts.finished()
        else:
            for number, (_, segments) in enumerate(rounds, start=1):
                packing.chunk(segments, last=number == len(rounds))
        return packing

    def payload(self, judged: Sequence[Judged], packing: CountedPacking[RebuiltSegment]) -> Payload:
        """What one process counted of its answers and packs."""
        stats = RolloutStats()
        for each in judged:
            stats.add(each)
        payload = stats.payload()
        payload.merge(packing.payload())
        return payload


def segment_of(judged: Judged) -> RebuiltSegment | None:
    """Prompt and target; None for an answer that is left out."""
    if judged.target is None:
        return None
    length = len(judged.rollout.prompt_token_ids) + len(judged.target.token_ids)
    return RebuiltSegment(judged.sample.sample_id, length)


def places_of(
    judged: Sequence[Judged], packing: CountedPacking[RebuiltSegment]
) -> list[Place | None]:
    """Where each answer's segment went; None for one that is left out."""
    places = iter(packing.places)
    return [None if each.target is None else next(places) for each in judged]
