"""How good an answer is, and what is wrong with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from learner.rollout_log import LoggedAnswer, StepAnswer, f1_of, hits_of

FaultName = Literal[
    "no_object",
    "truncated",
    "repeated",
    "dropped",
    "missed",
    "false_positive",
    "wrong_desc",
    "not_supervised",
]


@dataclass(frozen=True)
class Fault:
    """label: a few words for a chip. meaning: a sentence for a reader."""

    label: str
    meaning: str
    has: Callable[[LoggedAnswer], bool]


FAULTS: dict[FaultName, Fault] = {
    "no_object": Fault(
        "no answer",
        "It is no JSON object: no `{`, or something before it.",
        lambda answer: answer.parse.invalid,
    ),
    "truncated": Fault(
        "truncated",
        "It ends before its outermost object is closed.",
        lambda answer: answer.parse.truncated,
    ),
    "repeated": Fault(
        "repeated itself",
        "The repeat guard ended it.",
        lambda answer: answer.repeat_terminated,
    ),
    "dropped": Fault(
        "dropped objects",
        "The strict parser refused at least one of its objects.",
        lambda answer: bool(answer.parse.dropped),
    ),
    "missed": Fault(
        "missed",
        "At least one ground truth has no match.",
        lambda answer: bool(answer.match.false_negatives),
    ),
    "false_positive": Fault(
        "false positives",
        "At least one of its objects has no match.",
        lambda answer: bool(answer.match.false_positives),
    ),
    "wrong_desc": Fault(
        "wrong description",
        "At least one match has another description than its ground truth.",
        lambda answer: hits_of(answer) < len(answer.match.pairs),
    ),
    "not_supervised": Fault(
        "not trained on",
        "It was left out of training.",
        lambda answer: isinstance(answer, StepAnswer) and not answer.supervised,
    ),
}


def faults_of(answer: LoggedAnswer) -> list[FaultName]:
    return [name for name, fault in FAULTS.items() if fault.has(answer)]


def badness(answer: LoggedAnswer) -> tuple[float, int, str]:
    """Sorts the worst answer first: lowest F1, then most missed, then by sample."""
    return f1_of(answer), -len(answer.match.false_negatives), answer.sample_id
