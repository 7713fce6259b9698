"""Answers of a run: what is wrong with each, which ones a page shows, and counts over all.

Where a page cannot hold all answers, two thirds of those shown are the worst ones and one third is
drawn from the rest with a seed. Of a run, each third of its logged steps has the same number of the
worst, since otherwise all would be of its first steps; the rest is of its first, middle and last
step.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from learner.analysis.report.charts import Bars, Chart, bar_chart, histogram, present
from learner.analysis.report.run_view import Line, RunView
from learner.runs.console import fraction, number
from learner.runs.declared import CHANNEL_B
from learner.runs.rollout_log import LoggedAnswer, StepAnswer, f1_of
from learner.runs.run_folder import RunFolder

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
        "repeated itself", "The repeat guard ended it.", lambda answer: answer.repeat_terminated
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
        lambda answer: len(answer.hit_pairs) < len(answer.match.pairs),
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


MOST = 200
_PARTS = 3
_WORST_SHARE = 2 / 3
_SEED = 0

A = TypeVar("A", bound=LoggedAnswer)


def choose(answers: Sequence[A], most: int = MOST) -> list[A]:
    """At most so many of them, the worst first."""
    ordered = sorted(answers, key=badness)
    if len(ordered) <= most:
        return ordered
    worst = round(most * _WORST_SHARE)
    return sorted(ordered[:worst] + _drawn(ordered[worst:], most - worst), key=badness)


class Chooser(Generic[A]):
    """Chooses from a run that is read step by step, and holds no more than it may choose.

    steps: all that will be offered, in order.
    """

    def __init__(self, steps: Sequence[int], most: int = MOST) -> None:
        self._part = {step: place * _PARTS // len(steps) for place, step in enumerate(steps)}
        self._drawn_from = {steps[0], steps[len(steps) // 2], steps[-1]} if steps else set()
        self._most = most
        self._worst_of_a_part = round(most * _WORST_SHARE / _PARTS)
        self._all: list[A] = []
        self._worst: list[list[A]] = [[] for _ in range(_PARTS)]
        self._pool: list[A] = []
        self.offered = 0

    def offer(self, step: int, answers: Sequence[A]) -> None:
        self.offered += len(answers)
        self._all = [*self._all, *answers] if self.offered <= self._most else []
        part = self._part[step]
        self._worst[part] = sorted([*self._worst[part], *answers], key=badness)
        del self._worst[part][self._worst_of_a_part :]
        if step in self._drawn_from:
            self._pool += _drawn(answers, self._most)

    def chosen(self) -> list[A]:
        """The worst first."""
        if self.offered <= self._most:
            return sorted(self._all, key=badness)
        worst = [answer for part in self._worst for answer in part]
        known = {id(answer) for answer in worst}
        rest = [answer for answer in self._pool if id(answer) not in known]
        return sorted(worst + _drawn(rest, self._most - len(worst)), key=badness)


def _drawn(answers: Sequence[A], count: int) -> list[A]:
    """So many of them, the same ones each time; all where there are not so many."""
    return random.Random(_SEED).sample(answers, min(count, len(answers)))


# Of a very long run, answers of so many steps are read, evenly spread.
MOST_STEPS = 4000


@dataclass
class Tally:
    """tokens, predicted, truths, dropped: answers by that number of an answer.

    finishes: answers by finish reason. faults: answers that have each.
    """

    answers: int = 0
    cut_short: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    faults: Counter[FaultName] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    predicted: Counter[int] = field(default_factory=Counter)
    truths: Counter[int] = field(default_factory=Counter)
    dropped: Counter[int] = field(default_factory=Counter)

    def offer(self, answers: Sequence[LoggedAnswer]) -> None:
        for answer in answers:
            self.answers += 1
            self.cut_short += answer.parse.truncated and answer.finish_reason == "length"
            self.finishes[answer.finish_reason or "not told"] += 1
            self.faults.update(faults_of(answer))
            self.tokens[len(answer.response_token_ids)] += 1
            self.predicted[len(answer.parse.objects)] += 1
            self.truths[len(answer.ground_truth)] += 1
            self.dropped[len(answer.parse.dropped)] += 1


@dataclass(frozen=True)
class ReadAnswers:
    """chosen: those that are shown. steps: how many have answers. read: of how many they were."""

    tally: Tally
    chosen: list[StepAnswer]
    steps: int
    read: int


def read_answers(folder: RunFolder, most_steps: int = MOST_STEPS) -> ReadAnswers:
    """Raises ContractError for a line that is no answer."""
    steps = folder.answer_steps()
    taken = _spread(steps, most_steps)
    tally, chooser = Tally(), Chooser[StepAnswer](taken)
    for step in taken:
        answers = folder.answers(step)
        tally.offer(answers)
        chooser.offer(step, answers)
    return ReadAnswers(tally, chooser.chosen(), len(steps), len(taken))


def _spread(steps: list[int], most: int) -> list[int]:
    """So many of them, the first and the last among them."""
    if len(steps) <= most:
        return steps
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


DROPS = "stage2_ab/channel_b/strict_drop/"
GUARD = "rollout/repeat_terminate_triggered_sequences"


def drop_meanings() -> dict[str, str]:
    """Why the parser drops an object, by reason."""
    return {
        metric.key.removeprefix(DROPS): metric.meaning.removeprefix("of those: ")
        for metric in CHANNEL_B
        if metric.key.startswith(DROPS)
    }


@dataclass(frozen=True)
class CountRow:
    """A thing that was counted, and what it is."""

    name: str
    meaning: str
    count: str
    share: str


def drop_chart(run: RunView, meanings: dict[str, str]) -> Chart | None:
    """Dropped objects by reason, over the steps with answers; None where none was dropped."""
    lines = [line for line in run.steps if any(key.startswith(DROPS) for key in line)]
    bars = [
        Bars(reason, place % 8 + 1, [line.get(DROPS + reason) for line in lines])
        for place, reason in enumerate(meanings)
    ]
    steps = [line["step"] for line in lines]
    return bar_chart("drops", "Dropped objects by reason", ["objects"], steps, bars)


def drop_totals(lines: list[Line], meanings: dict[str, str]) -> dict[str, int]:
    return {
        reason: int(sum(line.get(DROPS + reason) or 0 for line in lines)) for reason in meanings
    }


def drop_rows(run: RunView, meanings: dict[str, str]) -> list[CountRow]:
    """All reasons, the most frequent first."""
    totals = drop_totals(run.steps, meanings)
    valid = sum(line.get("stage2_ab/channel_b/N_valid_pred") or 0 for line in run.steps)
    predicted = valid + sum(totals.values())
    ordered = sorted(totals, key=lambda reason: -totals[reason])
    return [_row(reason, meanings[reason], totals[reason], predicted) for reason in ordered]


def _row(name: str, meaning: str, count: int, of: float) -> CountRow:
    return CountRow(name, meaning, number(count), fraction(count, of, places=2))


def guard_chart(run: RunView) -> Chart | None:
    points = run.series(GUARD)
    steps, bars = [step for step, _ in points], [value for _, value in points]
    series = [Bars("ended by the guard", 2, bars)]
    title = "Answers that the repeat guard ended"
    return bar_chart("guard", title, ["answers"], steps, series, wide=False)


def finish_rows(tally: Tally) -> list[CountRow]:
    meanings = {
        "stop": "the model ended it",
        "length": "max_new_tokens, or the room of the model, ended it",
        "not told": "the backend does not say",
    }
    return [
        _row(reason, meanings.get(reason, ""), count, tally.answers)
        for reason, count in tally.finishes.most_common()
    ]


def fault_rows(tally: Tally) -> list[CountRow]:
    return [
        _row(fault.label, fault.meaning, tally.faults[name], tally.answers)
        for name, fault in FAULTS.items()
    ]


def histograms(tally: Tally) -> list[Chart]:
    return present(
        histogram("tokens", "Lengths of answers", "tokens", tally.tokens, 1),
        histogram("predicted", "Objects predicted", "objects of an answer", tally.predicted, 3),
        histogram("truths", "Objects annotated", "objects of a sample", tally.truths, 4),
        histogram("dropped", "Objects dropped", "objects of an answer", tally.dropped, 2),
    )
