"""Score a policy by its rollouts: generate, parse strictly, match, count (EVAL-01).

Sample -> RolloutOutput -> ParsedRollout -> MatchResult -> ScoredAnswer -> Scores
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from learner.config.rollout_matching import MatchingConfig
from learner.matching import match_objects
from learner.metrics import Payload
from learner.parsing import parse_rollout
from learner.rollout.policy import Policy
from learner.rollout_log import Judged, LoggedAnswer, f1_of, hits_of
from learner.tokens import Tokenizer
from learner.types import RolloutOutput, Sample

IOU_THRESHOLD = 0.5


class ScoredAnswer(LoggedAnswer):
    """An answer, how it was matched at IoU 0.5, and its own scores.

    hits: matched objects of the right description. precision: hits / predicted; recall: hits /
    ground truths; None where that divides by nothing. f1: as `f1_of` has it.
    """

    hits: int
    precision: float | None
    recall: float | None
    f1: float

    @classmethod
    def scored(cls, judged: Judged) -> "ScoredAnswer":
        answer = LoggedAnswer.of(judged)
        said, truths = answer.parse.objects, answer.ground_truth
        hits = hits_of(answer)
        return cls(
            **dict(answer),
            hits=hits,
            precision=hits / len(said) if said else None,
            recall=hits / len(truths) if truths else None,
            f1=f1_of(answer),
        )


@dataclass(frozen=True)
class Scores:
    """Micro-averaged over all objects. A hit has mask IoU >= 0.5 and the same description."""

    predicted: int
    ground_truths: int
    hits: int
    located: int
    dropped: int

    @classmethod
    def of(cls, answers: Iterable[ScoredAnswer]) -> "Scores":
        answers = list(answers)
        return cls(
            predicted=sum(len(answer.parse.objects) for answer in answers),
            ground_truths=sum(len(answer.ground_truth) for answer in answers),
            hits=sum(answer.hits for answer in answers),
            located=sum(len(answer.match.pairs) for answer in answers),
            dropped=sum(len(answer.parse.dropped) for answer in answers),
        )

    @property
    def precision(self) -> float:
        return self.hits / max(self.predicted, 1)

    @property
    def recall(self) -> float:
        return self.hits / max(self.ground_truths, 1)

    @property
    def f1(self) -> float:
        return 2 * self.hits / max(self.predicted + self.ground_truths, 1)

    @property
    def box_precision(self) -> float:
        """The same of boxes alone: descriptions are ignored."""
        return self.located / max(self.predicted, 1)

    @property
    def box_recall(self) -> float:
        return self.located / max(self.ground_truths, 1)

    @property
    def box_f1(self) -> float:
        return 2 * self.located / max(self.predicted + self.ground_truths, 1)

    def payload(self) -> Payload:
        objects = self.predicted + self.ground_truths
        payload = Payload()
        payload.rate(
            {
                "eval/precision": (self.hits, self.predicted),
                "eval/recall": (self.hits, self.ground_truths),
                "eval/f1": (2 * self.hits, objects),
                "eval/box_f1": (2 * self.located, objects),
            }
        )
        counts = ("predicted", "ground_truths", "dropped")
        payload.add({f"eval/{name}": getattr(self, name) for name in counts})
        return payload


@dataclass(frozen=True)
class Evaluation:
    """answers: one per sample, in order. notes: metrics of the calls, and of the push if any."""

    answers: list[ScoredAnswer]
    notes: Payload

    @property
    def scores(self) -> Scores:
        return Scores.of(self.answers)


def evaluate(
    policy: Policy,
    samples: Sequence[Sample],
    seed: int,
    tokenizer: Tokenizer,
    log_calls: Callable[[dict[str, Any]], None] | None = None,
    *,
    allow_poly: bool,
) -> Evaluation:
    """Roll out every sample with the weights that were pushed last, and score the answers.

    log_calls: takes the record of the calls.
    allow_poly: false in the two-channel variant, where a polygon is no prediction.
    """
    try:
        outputs = policy.answer(samples, seed)
    finally:
        record, notes = policy.take_notes()
        if log_calls is not None:
            log_calls({"evaluation_seed": seed, **record})
    answers = [
        ScoredAnswer.scored(judge(sample, output, tokenizer, allow_poly=allow_poly))
        for sample, output in zip(samples, outputs, strict=True)
    ]
    return Evaluation(answers, notes)


def evaluation_metrics(scores: Payload, notes: Payload) -> dict[str, float]:
    """Scores and what they took, as they are logged: every key under `eval/`."""
    taken = {f"eval/{key}": value for key, value in notes.metrics().items()}
    return scores.metrics() | taken


def judge(
    sample: Sample, output: RolloutOutput, tokenizer: Tokenizer, *, allow_poly: bool
) -> Judged:
    """Parse an answer and match it at IoU 0.5; nothing is trained on it."""
    parsed = parse_rollout(output.response_token_ids, tokenizer, allow_poly=allow_poly)
    match = match_objects(
        parsed.objects, sample.objects, MatchingConfig(maskiou_gate=IOU_THRESHOLD)
    )
    return Judged(sample, output, parsed, match)
