"""Score a policy by its rollouts: generate, parse strictly, match, count.

Sample -> RolloutOutput -> ParsedRollout -> MatchResult -> Scores
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from learner.config.rollout_matching import MatchingConfig
from learner.matching import match_objects
from learner.metrics import Payload
from learner.parsing import parse_rollout
from learner.rollout.policy import Policy
from learner.tokens import Tokenizer
from learner.types import ParsedRollout, Sample

IOU_THRESHOLD = 0.5


@dataclass(frozen=True)
class Scores:
    """Micro-averaged over all objects. A hit has mask IoU >= 0.5 and the same description."""

    predicted: int
    ground_truths: int
    hits: int
    located: int
    dropped: int

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
    def box_f1(self) -> float:
        """F1 when descriptions are ignored."""
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


def evaluate(
    policy: Policy,
    samples: Sequence[Sample],
    seed: int,
    tokenizer: Tokenizer,
    log_calls: Callable[[dict[str, Any]], None] | None = None,
    *,
    allow_poly: bool,
) -> tuple[Scores, Payload]:
    """Roll out every sample with the newest weights and score the answers.

    log_calls: takes the record of the calls.
    allow_poly: false in the two-channel variant, where a polygon is no prediction.

    Returns the scores, and the metrics of the calls and of the push, if there was one.
    """
    try:
        policy.push_if_stale()
        outputs = policy.answer(samples, seed)
    finally:
        record, notes = policy.take_notes()
        if log_calls is not None:
            log_calls({"evaluation_seed": seed, **record})
    answers = [output.response_token_ids for output in outputs]
    parsed = [parse_rollout(ids, tokenizer, allow_poly=allow_poly) for ids in answers]
    return score(zip(samples, parsed, strict=True)), notes


def evaluation_metrics(scores: Payload, notes: Payload) -> dict[str, float]:
    """Scores and what they took, as they are logged: every key under `eval/`."""
    taken = {f"eval/{key}": value for key, value in notes.metrics().items()}
    return scores.metrics() | taken


def score(answers: Iterable[tuple[Sample, ParsedRollout]]) -> Scores:
    """Match at IoU 0.5 and count."""
    config = MatchingConfig(maskiou_gate=IOU_THRESHOLD)
    predicted = ground_truths = hits = located = dropped = 0
    for sample, parsed in answers:
        match = match_objects(parsed.objects, sample.objects, config)
        predicted += len(parsed.objects)
        ground_truths += len(sample.objects)
        located += len(match.pairs)
        hits += sum(parsed.objects[p].desc == sample.objects[g].desc for p, g in match.pairs)
        dropped += len(parsed.dropped)
    return Scores(predicted, ground_truths, hits, located, dropped)
