"""What is counted over all logged answers of a run, read once, step by step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.report.choose import Chooser
from learner.report.outcomes import FaultName, faults_of
from learner.rollout_log import LoggedAnswer, StepAnswer
from learner.run_folder import RunFolder

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
