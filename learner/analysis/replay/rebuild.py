"""Logged steps of a run, and their reconstruction by the functions of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from learner.config.schema import Config
from learner.data.checkpoint import TOKENIZER, Checkpoint
from learner.runs.checkpoint import checkpoints_in
from learner.runs.metrics import Payload, rollout_payload
from learner.runs.resume import data_digest
from learner.runs.rollout_log import StepAnswer
from learner.runs.run_folder import RunFolder
from learner.stages.packing import StepPacker
from learner.stages.targets import run_stages
from learner.stages.tokens import Tokenizer
from learner.types import AssessedRollout
from shared_contracts.errors import ContractError

# Longest list of steps or samples without an ellipsis.
_LISTED = 8


def find_tokenizer(run: RunFolder, config: Config, given: Path | None) -> Path:
    """Return the folder with a run's tokenizer: `given`, else that of its model or a checkpoint.

    Raises ContractError, with the problem of each folder, if none has it.
    """
    wanted = run.facts().get("tokenizer_sha256")
    if wanted is None:
        raise ContractError(
            str(run.path / "run.json"),
            "has no tokenizer_sha256: an earlier version wrote it",
            "Read it with the version of Rollmatch that wrote it (`versions` in run.json)",
        )
    first = Checkpoint(config.model.model).processor
    problems: list[str] = []
    for folder in [given] if given else [first, *checkpoints_in(run.path)]:
        file = folder / TOKENIZER
        if not file.is_file():
            problems.append(f"{folder} has no {TOKENIZER}")
        elif data_digest(file) != wanted:
            problems.append(f"{folder} has another {TOKENIZER} than when the run was started")
        else:
            return folder
    raise ContractError(
        "--tokenizer" if given else f"model.model of {run.path}",
        "; ".join(problems),
        f"Name a folder with the {TOKENIZER} of the run with --tokenizer (SHA-256 {wanted})",
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer as training does."""
    from transformers import AutoTokenizer  # slow

    loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer: Tokenizer = loaded
    return tokenizer


@dataclass(frozen=True)
class LoggedStep:
    """step: from 1. ranks: the answers of each process, in request order.

    metrics: the step's line in `metrics.jsonl`; empty if it is not logged yet.
    """

    step: int
    ranks: Sequence[Sequence[StepAnswer]]
    metrics: dict[str, Any]

    @property
    def answers(self) -> list[StepAnswer]:
        return [answer for rank in self.ranks for answer in rank]

    def sample(self, wanted: str) -> list[StepAnswer]:
        """Return the answers to a sample; `named` defines matching names.

        Raises ContractError for an unknown or ambiguous name.
        """
        matching = [answer for answer in self.answers if named(answer.sample_id, wanted)]
        ids = sorted({answer.sample_id for answer in matching})
        if len(ids) == 1:
            return matching
        known = ids or [answer.sample_id for answer in self.answers]
        fault = f"step {self.step} has no sample {wanted!r}"
        if ids:
            fault = f"{wanted!r} is the end of {listed(ids)}"
        raise ContractError("--sample", fault, f"Name one of {listed(known)}")


class StepLog:
    """The logged steps of a run; common files are read once."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        steps = (line for line in run.metrics() if "step/channel_b" in line)
        self._metrics = {line["step"]: line for line in steps}
        self._ranks: dict[int, set[int]] = {}
        for line in run.calls():
            if "step" in line:
                self._ranks.setdefault(line["step"], set()).add(line["rank"])

    @property
    def steps(self) -> list[int]:
        """The steps of channel B, in order; raises ContractError if there are none."""
        steps = self._run.answer_steps()
        if not steps:
            raise ContractError(
                str(self._run.path),
                "no answers are logged in it",
                "Name a run with steps of channel B and training.log_rollouts: true",
            )
        return steps

    def step(self, step: int) -> LoggedStep:
        """Return a step; raises ContractError if its log is missing or incomplete."""
        ranks: dict[int, list[StepAnswer]] = {}
        for answer in self._run.answers(step):
            ranks.setdefault(answer.rank, []).append(answer)
        if not ranks:
            found = f"no answers of step {step} are logged"
            if self._metrics.get(step, {}).get("step/channel_b") == 0:
                found = f"step {step} was one of channel A, which has no answers"
            do = f"Choose a step of channel B: {listed(self.steps)}"
            raise ContractError(f"--step {step}", found, do)
        if missing := sorted(self._ranks.get(step, set()) - set(ranks)):
            raise ContractError(
                f"{self._run.path}, step {step}",
                f"process {missing[0]} requested answers, and its file in rollouts/ is missing",
                "Restore it; if the run ended within this step, choose one before it",
            )
        in_order = [ranks[rank] for rank in sorted(ranks)]
        return LoggedStep(step, in_order, self._metrics.get(step, {}))

    def step_with(self, wanted: str) -> int:
        """Return the step with a sample; raises ContractError unless exactly one step has it."""
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


def named(sample_id: str, wanted: str) -> bool:
    """Return whether a name matches: `/data/train.jsonl:12` is also `train.jsonl:12`, and `12`."""
    return sample_id == wanted or sample_id.endswith((f"/{wanted}", f":{wanted}"))


def listed(items: Sequence[object]) -> str:
    """Return a list as text; a long one shows its ends and its length."""
    if len(items) <= _LISTED:
        return ", ".join(map(str, items))
    ends = [*items[: _LISTED - 2], "...", *items[-2:]]
    return f"{', '.join(map(str, ends))} ({len(items)} in all)"


@dataclass(frozen=True)
class RebuiltSegment:
    """A segment without its tensors."""

    sample_id: str
    length: int

    def __len__(self) -> int:
        return self.length


# (logged, rebuilt) for each answer of a process.
Rebuilt = Sequence[tuple[StepAnswer, AssessedRollout]]
RebuiltPacks = StepPacker[RebuiltSegment, list[RebuiltSegment]]


@dataclass(frozen=True)
class Rebuilder:
    """Repeats the processing of answers by a run. tokenizer: of its model."""

    config: Config
    tokenizer: Tokenizer

    def rebuild(self, answers: Sequence[StepAnswer]) -> Rebuilt:
        """Parse and match the answers of a process, build targets, and compute group rewards."""
        samples, rollouts = [each.sample for each in answers], [each.rollout for each in answers]
        assessed = run_stages(samples, rollouts, self.tokenizer, self.config)
        return list(zip(answers, assessed, strict=True))

    def packed(self, own: Rebuilt) -> tuple[RebuiltPacks, Payload]:
        """Return the packs and the counts of one process.

        Raises ContractError if the answers cannot be packed.
        """
        config = self.config
        packing: RebuiltPacks = StepPacker(config.training, config.global_max_length, list)
        rounds = [
            (of[0][0].weights_version[0], [s for _, each in of if (s := segment_of(each))])
            for _, chunk in groupby(own, lambda pair: pair[0].chunk)
            if (of := list(chunk))
        ]
        if config.rollout_matching.async_rollout.enabled:  # an empty part ends a batch
            rounds.append((rounds[-1][0], []))
        for number, (version, segments) in enumerate(rounds, start=1):
            packing.chunk(segments, last=number == len(rounds), version=version)
        payload = rollout_payload([assessed for _, assessed in own])
        payload.merge(packing.payload())
        return packing, payload


def segment_of(assessed: AssessedRollout) -> RebuiltSegment | None:
    """Return the segment of prompt and target; None without a target."""
    if assessed.target is None:
        return None
    length = len(assessed.rollout.prompt_token_ids) + len(assessed.target.token_ids)
    return RebuiltSegment(assessed.sample.sample_id, length)
