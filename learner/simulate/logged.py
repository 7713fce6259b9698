"""What a run folder says of speeds and lengths.

resolved_config.yaml    the settings that the run had
metrics.jsonl           seconds of every phase, packs, tokens
rollouts/step_*.jsonl   prompts and answers, sample by sample
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.resume import METRICS
from learner.rollout_log import unfolded
from learner.run_folder import RunFolder, json_lines
from learner.simulate.lengths import Pool, Tokens
from learner.types import Channel
from shared_contracts.errors import ContractError

# Samples of a run whose length is given in steps: no batch is larger.
_ENOUGH = 2**20


@dataclass(frozen=True)
class LoggedStep:
    """metrics: of all processes. rollouts: of each process, prompt and answer in tokens; empty
    for channel A, and where they are not logged.
    """

    metrics: dict[str, float]
    rollouts: Sequence[Sequence[tuple[int, int]]] = ()

    @property
    def channel(self) -> Channel:
        return "B" if self.metrics["step/channel_b"] else "A"

    def seconds(self, phase: str) -> float:
        return self.metrics.get(f"time/{phase}_s", 0.0)

    @property
    def segments(self) -> float:
        return self.metrics["packing/post_rollout_segments"]

    @property
    def forwards(self) -> float:
        return self.metrics["packing/post_rollout_packs"] + self.metrics.get("step/replays", 0.0)

    @property
    def tokens(self) -> float:
        return self.metrics["packing/post_rollout_selected_total_len"]


@dataclass(frozen=True)
class LoggedRun:
    """ranks: learner processes. seconds: of the training, None for a run that has not ended.

    All of it is of the run since it was last started. Steps are in order; the first one of each
    channel is left out where there are others, as it pays for what is done once.
    """

    folder: Path
    config: Config
    ranks: int
    steps: Sequence[LoggedStep]
    all_steps: Sequence[LoggedStep]
    seconds: float | None

    def of(self, channel: Channel) -> list[LoggedStep]:
        return [step for step in self.steps if step.channel == channel]

    @property
    def asynchronous(self) -> bool:
        """Answers and their packs were made beside the steps, which say nothing of their time."""
        return self.config.rollout_matching.async_rollout.enabled

    @property
    def answered(self) -> list[LoggedStep]:
        """Steps whose answers are logged."""
        return [step for step in self.steps if step.rollouts]


def read_run(folder: Path) -> LoggedRun:
    """Read a run folder.

    Raises:
        ContractError: it is none, or no step is logged in it.
    """
    run = RunFolder.open(folder)
    began = run.facts().get("started_at_step", 0)
    lines = [line for line in run.metrics() if line["step"] > began]
    ranks = 1 + len(list(folder.glob("rollout_calls.rank*.jsonl")))
    steps = [
        LoggedStep(
            {key: value for key, value in line.items() if isinstance(value, int | float)},
            _rollouts(run, line["step"], ranks),
        )
        for line in lines
        if "step/channel_b" in line
    ]
    if not steps:
        found = f"no step is logged after step {began}" if began else "no step is logged"
        raise ContractError(str(folder / METRICS), found, "Name the folder of a run that has some")
    seconds = next((line["train_runtime"] for line in lines if "train_runtime" in line), None)
    return LoggedRun(folder, run.config(), ranks, list(_warmed_up(steps)), steps, seconds)


def pool_of(run: LoggedRun, config: Config, seed: int) -> Pool:
    """Lengths as the run logged them, to be drawn from for a run of `config`.

    What channel B appended to an answer is the mean of its step; what channel A taught is as
    much more or less than that as the means of the packs are.

    Raises:
        ContractError: no answers are logged.
    """
    if not run.answered:
        raise ContractError(
            str(run.folder / "rollouts"),
            "no answers are logged",
            "Give lengths with --lengths, or name a run with steps of channel B",
        )
    known = [tokens for step in run.answered for tokens in _tokens(step)]
    before = mean(tokens.prompt for tokens in known)
    taught = [step.tokens / step.segments - before for step in run.of("A") if step.segments]
    more = round(mean(taught) - mean(t.corrected for t in known)) if taught else 0
    known = [t._replace(target=max(1, t.corrected + more)) for t in known]
    return Pool(known, _samples(config), seed)


def _samples(config: Config) -> int:
    """In the training data; it need not be there for a run whose length is given in steps."""
    file = config.data.train_jsonl
    if config.training.max_steps is not None and not file.is_file():
        return _ENOUGH
    return len(read_samples(file, allow_poly=config.allow_poly))


def _tokens(step: LoggedStep) -> list[Tokens]:
    rollouts = [rollout for of_rank in step.rollouts for rollout in of_rank]
    appended = (step.tokens - sum(map(sum, rollouts))) / len(rollouts)
    return [
        Tokens(prompt, answer, 0, max(1, round(answer + appended))) for prompt, answer in rollouts
    ]


def _warmed_up(steps: Sequence[LoggedStep]) -> Iterator[LoggedStep]:
    channels = [step.channel for step in steps]
    seen = set[Channel]()
    for step in steps:
        if step.channel in seen or channels.count(step.channel) == 1:
            yield step
        seen.add(step.channel)


def _rollouts(run: RunFolder, step: int, ranks: int) -> list[list[tuple[int, int]]]:
    files = run.answer_files(step)
    if len(files) < ranks:
        return []
    return [
        [
            (len(unfolded(line["prompt_token_ids"])), len(line["response_token_ids"]))
            for line in json_lines(file)
        ]
        for file in files.values()
    ]
