"""What a run folder has of a step of channel B; a step that it does not have is told why."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from learner.rollout_log import StepAnswer
from learner.run_folder import RunFolder
from shared_contracts.errors import ContractError

# So many steps, or samples, are listed whole.
_LISTED = 8


@dataclass(frozen=True)
class LoggedStep:
    """A step as a run logged it.

    step: from 1. ranks: the answers of each process, in the order in which it asked.
    metrics: of its line in `metrics.jsonl`; empty where it has none yet.
    """

    step: int
    ranks: Sequence[Sequence[StepAnswer]]
    metrics: dict[str, Any]

    @property
    def answers(self) -> list[StepAnswer]:
        return [answer for rank in self.ranks for answer in rank]

    def mates(self, answer: StepAnswer) -> list[StepAnswer]:
        """The others whose segments are in the pack of this one's."""
        if answer.segment is None:
            return []
        return [
            each
            for each in self.answers
            if each is not answer
            and each.rank == answer.rank
            and each.segment is not None
            and each.segment.pack == answer.segment.pack
        ]

    def sample(self, wanted: str) -> list[StepAnswer]:
        """The answers to a sample, as `named` finds them.

        Raises ContractError for a name that none has, or several.
        """
        found = [answer for answer in self.answers if named(answer.sample_id, wanted)]
        ids = sorted({answer.sample_id for answer in found})
        if len(ids) == 1:
            return found
        raise ContractError(
            "--sample",
            f"{wanted!r} is the end of {listed(ids)}"
            if ids
            else f"step {self.step} has no sample {wanted!r}",
            f"Name one of {listed(ids or [answer.sample_id for answer in self.answers])}",
        )


class StepLog:
    """The logged steps of a run. The logs of all steps are read once."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        steps = (line for line in run.metrics() if "step/channel_b" in line)
        self._metrics = {line["step"]: line for line in steps}
        self._ranks = run.calling_ranks()

    @property
    def steps(self) -> list[int]:
        """Of channel B, in order; ContractError where there are none."""
        steps = self._run.answer_steps()
        if not steps:
            raise ContractError(
                str(self._run.path),
                "no answers are logged in it",
                "Name a run with steps of channel B and training.log_rollouts: true",
            )
        return steps

    def step(self, step: int) -> LoggedStep:
        """The log of a step.

        Raises:
            ContractError: no answers are logged of it, or not all, or not all that became of them.
        """
        answers = self._run.answers(step)
        if not answers:
            raise self._absent(step)
        by_rank: dict[int, list[StepAnswer]] = {}
        for answer in answers:
            by_rank.setdefault(answer.rank, []).append(answer)
        if missing := sorted(self._ranks.get(step, set()) - set(by_rank)):
            raise ContractError(
                f"{self._run.path}, step {step}",
                f"process {missing[0]} asked for answers, and its file in rollouts/ is missing",
                "Restore it; if the run ended within this step, choose one before it",
            )
        ranks = [by_rank[rank] for rank in sorted(by_rank)]
        return LoggedStep(step, ranks, self._metrics.get(step, {}))

    def step_with(self, wanted: str) -> int:
        """The step that has a sample; ContractError where none has it, or several."""
        steps = [
            step
            for step in self.steps
            if any(named(answer.sample_id, wanted) for answer in self._run.answers(step))
        ]
        if len(steps) == 1:
            return steps[0]
        found = f"steps {listed(steps)} have" if steps else "no logged step has"
        do = "Say which step with --step" if steps else "Name a sample as FILE:LINE of its data"
        raise ContractError("--sample", f"{found} a sample {wanted!r}", do)

    def _absent(self, step: int) -> ContractError:
        steps = self.steps
        found = f"no answers of step {step} are logged"
        if self._metrics.get(step, {}).get("step/channel_b") == 0:
            found = f"step {step} was one of channel A, which has no answers"
        return ContractError(
            f"--step {step}", found, f"Choose a step of channel B: {listed(steps)}"
        )


def named(sample_id: str, wanted: str) -> bool:
    """`/data/train.jsonl:12` is also `train.jsonl:12`, and `12`."""
    return sample_id == wanted or sample_id.endswith((f"/{wanted}", f":{wanted}"))


def listed(items: Sequence[object]) -> str:
    """All of a few, else the first and the last ones and how many they are."""
    if len(items) <= _LISTED:
        return ", ".join(map(str, items))
    ends = [*items[: _LISTED - 2], "...", *items[-2:]]
    return f"{', '.join(map(str, ends))} ({len(items)} in all)"
