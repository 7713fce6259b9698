"""Answers of a run: faults, the subset for a page, and counts over all answers.

A page with too many answers shows the worst ones (two thirds), and an even spread of the others by
rank. All steps of a run have nearly as many of the shown answers.
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


# Of answers that were not read, or only in part.
UNREAD = {str(fault): meaning for fault, meaning in ANSWER_FAULTS.items()}
UNREAD["invalid_rollout"] = "no start of the answer format"


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
    reasons = Counter(
        answer.parse.fault or ("invalid_rollout" if answer.parse.invalid else None)
        for answer in answers
    )
    return count_rows(reasons, UNREAD, len(answers))


def badness(answer: LoggedAnswer) -> tuple[float, int, str]:
    """Return a sort key, worst first: lowest F1, then most missed objects, then sample id."""
    return f1_of(answer), -len(answer.match.false_negatives), answer.sample_id


# Limits of a page: shown answers, and steps whose answers are read.
MOST = 200
MOST_STEPS, MOST_AFTER_ERROR = MOST, 100  # a process that failed ends within seconds
_WORST_SHARE = 2 / 3

A = TypeVar("A")
Answer = TypeVar("Answer", bound=LoggedAnswer)


def sample_answers(answers: Sequence[Answer], most: int = MOST) -> list[Answer]:
    """Return at most `most` answers, worst first: the worst, and an even spread of the others."""
    ordered = sorted(answers, key=badness)
    worst = round(most * _WORST_SHARE)
    return ordered[:worst] + _spread(ordered[worst:], most - worst)


def _spread(values: Sequence[A], most: int) -> list[A]:
    """Return at most `most` values, evenly spread; the last is one of them."""
    count = min(most, len(values))
    return [values[place * len(values) // count - 1] for place in range(1, count + 1)]


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


def read_answers(folder: RunFolder, most_steps: int = MOST_STEPS) -> tuple[Tally, list[StepAnswer]]:
    """Read the answers of at most `most_steps` steps, evenly spread over the run.

    Returns the counts of all of them, and those of the page, worst first.

    Raises ContractError for an invalid line.
    """
    tally, shown = Tally(), list[StepAnswer]()
    steps = _spread(folder.answer_steps(), most_steps)
    for step in steps:
        answers = folder.answers(step)
        tally.add(answers)
        shown += sample_answers(answers, max(3, MOST // len(steps)))  # two worst, one other
    return tally, _spread(sorted(shown, key=badness, reverse=True), MOST)[::-1]
