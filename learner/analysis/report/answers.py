"""Answers of a run: faults, the subset for a page, counts over all answers, and findings.

A page with too many answers shows the worst ones (two thirds), and an even spread of the others by
rank. All steps of a run have nearly as many of the shown answers.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from learner.analysis.report.run_view import RunView, mean
from learner.data.show import Table
from learner.runs.console import counted, fraction
from learner.runs.declared import ANSWER_FAULTS, DROPS
from learner.runs.rollout_log import LoggedAnswer, StepAnswer, f1_of
from learner.runs.run_folder import RunFolder

WRONG, LEFT_OUT = "wrong description", "not trained on"
Weight = Literal["bad", "look"]
B = "stage2_ab/channel_b/"
GUARD = "rollout/repeat_terminate_triggered_sequences"
# Smallest shares for a finding.
_TRUNCATED = 0.01
_WRONG = 0.1
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


@dataclass(frozen=True)
class Finding:
    """A sentence of the page. section: slug of the section with the details."""

    weight: Weight
    text: str
    section: str


def findings(run: RunView, tally: Tally, unreadable: int) -> list[Finding]:
    """Return all findings: bad ones, then those to look at.

    unreadable: number of unreadable images of the shown answers.
    """
    found = [*_failures(run), *_drops(run), *_answers(run, tally)]
    if unreadable:
        text = f"{counted(unreadable, 'image')} of the answers shown cannot be read any more"
        found.append(Finding("look", text, "gallery"))
    return sorted(found, key=lambda finding: finding.weight != "bad")


def _failures(run: RunView) -> Iterator[Finding]:
    if run.error is not None:
        yield Finding("bad", f"The run was ended by an error: {run.error}", "config")
    for key, name in (("loss", "The loss"), ("grad_norm", "The gradient norm")):
        broken = [step for step, value in run.series(key) if value is None]
        if broken:
            where = f"{counted(len(broken), 'step')} (first: step {broken[0]})"
            yield Finding("bad", f"{name} was not a finite number in {where}", "curves")

    def total(key: str) -> int:
        keys = (key, f"eval/{key}")
        return int(sum(line.get(each) or 0 for line in run.metrics for each in keys))

    if lost := total("rollout/servers_lost"):
        yield Finding("bad", f"Servers were lost {counted(lost, 'time')}", "curves")
    if retries := total("rollout/retries"):
        yield Finding("look", f"{counted(retries, 'server call')} had to be repeated", "curves")
    fallbacks = {line["sync_fallback"] for line in run.calls if line.get("sync_fallback")}
    for reason in sorted(map(str, fallbacks)):
        yield Finding("bad", f"Full weights replaced the adapter: {reason}", "curves")


def _drops(run: RunView) -> Iterator[Finding]:
    """Yield a finding for each reason of incompletely parsed answers and dropped objects.

    Shares are of the answers and of the predicted objects of all logged steps.
    """
    totals = {name: run.total(f"{B}{name}") for name in UNREAD}
    of_step = run.config.training.effective_batch_size * run.config.answers_per_sample
    answers = count_rows(totals, UNREAD, len(run.by_channel.get("B", [])) * of_step)
    dropped = {reason: run.total(f"{B}strict_drop/{reason}") for reason in DROPS}
    predicted = run.total(f"{B}N_valid_pred") + sum(dropped.values())
    objects = sorted(count_rows(dropped, DROPS, predicted), key=lambda row: -row.count)
    for counts, unit, verb in ((answers, "answer", "with"), (objects, "object", "dropped as")):
        for each in counts:
            what = f"{counted(each.count, unit)} {verb} {each.name} ({each.share})"
            yield Finding("look", f"{what}: {each.meaning}", "gallery")


def _answers(run: RunView, tally: Tally) -> Iterator[Finding]:
    truncated = mean(run.series("rollout/parse_truncated_rate")) or 0.0
    limit = ""
    if tally.answers:
        truncated = tally.cut_short / tally.answers
        limit = f" at max_new_tokens ({run.config.rollout_matching.max_new_tokens})"
    if truncated >= _TRUNCATED:
        yield Finding("look", f"{truncated:.1%} of the answers were truncated{limit}", "gallery")
    wrong, left_out = tally.faults[WRONG], tally.faults[LEFT_OUT]
    if tally.answers and wrong / tally.answers >= _WRONG:
        of_all = fraction(wrong, tally.answers)
        text = f"{of_all} of the answers describe an object they found by a wrong name"
        yield Finding("look", text, "gallery")
    if left_out:
        text = f"{counted(left_out, 'answer')} could not be trained on and were left out"
        yield Finding("look", text, "gallery")
    if ended := run.total(GUARD):
        yield Finding("look", f"The repeat guard ended {counted(ended, 'answer')}", "gallery")
