"""Answers of a run: their faults, the subset that a page shows, and counts over all.

A page that cannot show all answers shows the worst ones (two thirds), and others that are spread
evenly from bad to good. Of a run, each third of its logged steps has the same number of them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from learner.runs.console import fraction
from learner.runs.rollout_log import LoggedAnswer, StepAnswer, f1_of
from learner.runs.run_folder import RunFolder

WRONG, LEFT_OUT = "wrong description", "not trained on"

# What is wrong with an answer, by label.
FAULTS: dict[str, Callable[[LoggedAnswer], bool]] = {
    "no JSON object": lambda answer: answer.parse.invalid,
    "truncated": lambda answer: answer.parse.truncated,
    "ended by the repeat guard": lambda answer: answer.repeat_terminated,
    "dropped objects": lambda answer: bool(answer.parse.dropped),
    "missed objects": lambda answer: bool(answer.match.false_negatives),
    "false positives": lambda answer: bool(answer.match.false_positives),
    WRONG: lambda answer: len(answer.hit_pairs) < len(answer.match.pairs),
    LEFT_OUT: lambda answer: isinstance(answer, StepAnswer) and not answer.supervised,
}


def faults_of(answer: LoggedAnswer) -> list[str]:
    return [label for label, has in FAULTS.items() if has(answer)]


def badness(answer: LoggedAnswer) -> tuple[float, int, str]:
    """A sort key, the worst answer first: lowest F1, then most missed objects, then sample."""
    return f1_of(answer), -len(answer.match.false_negatives), answer.sample_id


# Limits of a page: answers that it shows, and steps whose answers are read.
MOST = 200
MOST_STEPS = 4000
_THIRDS = 3
_WORST_SHARE = 2 / 3

A = TypeVar("A", bound=LoggedAnswer)


def sample_answers(answers: Sequence[A], most: int = MOST) -> list[A]:
    """At most `most` answers, the worst first: the worst ones, and a spread over the others."""
    ordered = sorted(answers, key=badness)
    if len(ordered) <= most:
        return ordered
    worst = round(most * _WORST_SHARE)
    others, count = ordered[worst:], most - worst
    return ordered[:worst] + [others[place * len(others) // count] for place in range(count)]


@dataclass(frozen=True)
class Counted:
    """A row of a table of counts. share: in percent; `-` of nothing."""

    name: str
    meaning: str
    count: int
    share: str

    @classmethod
    def of(cls, name: str, meaning: str, count: int, whole: int) -> "Counted":
        return cls(name, meaning, count, fraction(count, whole, places=2))


@dataclass
class Tally:
    """cut_short: answers that `max_new_tokens` truncated. faults: answers that have each fault."""

    answers: int = 0
    cut_short: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, answers: Sequence[LoggedAnswer]) -> None:
        for answer in answers:
            self.answers += 1
            self.cut_short += answer.parse.truncated and answer.finish_reason == "length"
            self.faults.update(faults_of(answer))

    def fault_counts(self) -> list[Counted]:
        return [Counted.of(label, "", self.faults[label], self.answers) for label in FAULTS]


@dataclass(frozen=True)
class ReadAnswers:
    """shown: the answers of the page. steps: steps with answers. read: steps that were read."""

    tally: Tally
    shown: list[StepAnswer]
    steps: int
    read: int


def read_answers(folder: RunFolder, most_steps: int = MOST_STEPS) -> ReadAnswers:
    """Of a long run, `most_steps` evenly spread steps. Raises ContractError for a wrong line."""
    steps = folder.answer_steps()
    taken = steps
    if len(steps) > most_steps:
        last = len(steps) - 1
        taken = [steps[round(place * last / (most_steps - 1))] for place in range(most_steps)]
    tally = Tally()
    thirds: list[list[StepAnswer]] = [[] for _ in range(_THIRDS)]
    for place, step in enumerate(taken):
        answers = folder.answers(step)
        tally.add(answers)
        third = place * _THIRDS // len(taken)
        thirds[third] = sample_answers([*thirds[third], *answers])
    if sum(map(len, thirds)) > MOST:
        thirds = [sample_answers(kept, MOST // _THIRDS) for kept in thirds]
    shown = sorted((answer for kept in thirds for answer in kept), key=badness)
    return ReadAnswers(tally, shown, len(steps), len(taken))
