"""Answers of a run: faults, the subset for a page, and counts over all answers.

A page with too many answers shows the worst ones (two thirds), and an even spread of the others by
rank. Each third of a run's logged steps has the same number of shown answers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from learner.data.show import Table
from learner.runs.console import fraction
from learner.runs.declared import ANSWER_FAULTS
from learner.runs.rollout_log import LoggedAnswer, StepAnswer, f1_of
from learner.runs.run_folder import RunFolder

WRONG, LEFT_OUT = "wrong description", "not trained on"

# Label of a fault -> predicate.
FAULTS: dict[str, Callable[[LoggedAnswer], bool]] = {
    "no start of the format": lambda answer: answer.parse.invalid,
    "not read, or only in part": lambda answer: answer.parse.fault is not None,
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


@dataclass(frozen=True)
class Counted:
    """A row of a table of counts. share: in percent; `-` for a share of 0."""

    name: str
    meaning: str
    count: int
    share: str


def count_rows(counts: Mapping[Any, int], meanings: Mapping[Any, str], whole: int) -> list[Counted]:
    """Return a row for each name of `meanings` that was counted. whole: of the shares."""
    return [
        Counted(name, meaning, counts[name], fraction(counts[name], whole, places=2))
        for name, meaning in meanings.items()
        if counts[name]
    ]


def count_table(title: str, unit: str, counts: Sequence[Counted]) -> Table:
    rows = [[each.name, f"{each.count:,}", each.share, each.meaning] for each in counts]
    return Table(title, ["", unit, "#share", "meaning"], rows)


def unread_answers(answers: Sequence[LoggedAnswer]) -> list[Counted]:
    """Count the answers that could not be read, or only in part, by their reasons."""
    faults = Counter(answer.parse.fault for answer in answers)
    return count_rows(faults, ANSWER_FAULTS, len(answers))


def badness(answer: LoggedAnswer) -> tuple[float, int, str]:
    """Return a sort key, worst first: lowest F1, then most missed objects, then sample id."""
    return f1_of(answer), -len(answer.match.false_negatives), answer.sample_id


# Limits of a page: shown answers, and steps whose answers are read.
MOST = 200
MOST_STEPS, MOST_AFTER_ERROR = 400, 100  # a process that failed ends within seconds
_THIRDS = 3
_WORST_SHARE = 2 / 3

A = TypeVar("A", bound=LoggedAnswer)


def sample_answers(answers: Sequence[A], most: int = MOST) -> list[A]:
    """Return at most `most` answers, worst first: the worst, and an even spread of the others."""
    ordered = sorted(answers, key=badness)
    if len(ordered) <= most:
        return ordered
    worst = round(most * _WORST_SHARE)
    others, count = ordered[worst:], most - worst
    return ordered[:worst] + [others[place * len(others) // count] for place in range(count)]


@dataclass
class Tally:
    """cut_short: answers that `max_new_tokens` truncated. faults: number of answers by fault."""

    answers: int = 0
    cut_short: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, answers: Sequence[LoggedAnswer]) -> None:
        for answer in answers:
            self.answers += 1
            self.cut_short += answer.parse.truncated and answer.finish_reason == "length"
            self.faults.update(faults_of(answer))

    def fault_counts(self) -> list[Counted]:
        return count_rows(self.faults, dict.fromkeys(FAULTS, ""), self.answers)


@dataclass(frozen=True)
class ReadAnswers:
    """shown: answers of the page. steps: number of steps with answers. read: number read."""

    tally: Tally
    shown: list[StepAnswer]
    steps: int
    read: int


def read_answers(folder: RunFolder, most_steps: int = MOST_STEPS) -> ReadAnswers:
    """Read the answers of at most `most_steps` steps, evenly spread over the run.

    Raises ContractError for an invalid line.
    """
    steps = folder.answer_steps()
    selected = steps
    if len(steps) > most_steps:
        last = len(steps) - 1
        selected = [steps[round(place * last / (most_steps - 1))] for place in range(most_steps)]
    tally = Tally()
    thirds: list[list[StepAnswer]] = [[] for _ in range(_THIRDS)]
    for place, step in enumerate(selected):
        answers = folder.answers(step)
        tally.add(answers)
        third = place * _THIRDS // len(selected)
        thirds[third] = sample_answers([*thirds[third], *answers])
    if sum(map(len, thirds)) > MOST:
        thirds = [sample_answers(kept, MOST // _THIRDS) for kept in thirds]
    shown = sorted((answer for kept in thirds for answer in kept), key=badness)
    return ReadAnswers(tally, shown, len(steps), len(selected))
