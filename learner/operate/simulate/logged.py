"""Speeds and lengths from the folder of a logged run.

resolved_config.yaml    the settings that the run had
metrics.jsonl           seconds of every phase, packs, tokens
rollouts/step_*.jsonl   prompts and answers, sample by sample

Learner    least squares of `time/learn_s` over forwards and tokens, channel by channel
Engine     the speeds with which the simulated rollouts of the logged lengths take as long as
           `time/rollout_s` records
The rest   medians, and what is left of the whole run's time

Both fits give outliers less weight. What a log cannot separate, such as a call from the prompts
that every call has equally many of, stays near the fractions in `_FRACTIONS`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean, median

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.operate.simulate.engines import Machines
from learner.operate.simulate.inputs import (
    ChannelSpeeds,
    EngineSpeed,
    LearnerSpeed,
    LearnSpeed,
    Pool,
    PushSpeed,
    ServerShape,
    Setting,
    Speeds,
    Tokens,
    declared_servers,
)
from learner.operate.simulate.outcome import SimulatedStep
from learner.operate.simulate.run import Clock, Rank
from learner.runs.rollout_log import unfolded
from learner.runs.run_folder import METRICS, RunFolder, json_lines
from learner.types import Channel
from shared_contracts.errors import ContractError

Array = npt.NDArray[np.float64]

# Most steps whose rollouts are simulated again and again.
_MOST_STEPS = 40
# Beyond this share of a typical time, a difference weighs less than its square.
_TYPICAL = 0.1
# How much a logarithm's distance from where it started weighs, beside a relative error of 1.
_PRIOR = 0.01
# Of the time of a rollout: its calls, its prompts, the steps themselves, their sequences.
_FRACTIONS = (0.01, 0.09, 0.8, 0.1)
_LEAST = 1e-9
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


@dataclass(frozen=True)
class Fitted:
    """Speeds, and what each was fitted from; `defaults`: those that were not."""

    speeds: Speeds
    sources: dict[str, str]


def fit(run: LoggedRun, server: ServerShape) -> Fitted:
    """Speeds of a run. server: the shape of its servers, which is not logged."""
    sources: dict[str, str] = {}
    learner = LearnerSpeed(
        a=_channel(run, "A", sources), b=_channel(run, "B", sources), update_s=_update(run, sources)
    )
    known = Speeds(server=server, learner=learner, push=_push(run, sources))
    speeds = known.model_copy(update={"engine": _engine(run, known, sources)})
    return Fitted(speeds, sources)


def _channel(run: LoggedRun, channel: Channel, sources: dict[str, str]) -> ChannelSpeeds:
    """A channel that was not run has the other one's speeds of learning."""
    steps = run.of(channel)
    other: Channel = "A" if channel == "B" else "B"
    borrowed = not steps
    steps = steps or run.of(other)
    own = run.config.stage2_ab
    iterated = (other if borrowed else channel) == "A" and own is not None
    iterations = own.n_softctx_iter if iterated and own is not None else 1
    work = np.array([(step.forwards, step.tokens) for step in steps]) / run.ranks
    seconds = np.array([step.seconds("learn") for step in steps])
    forward_s, token_s = _line(work, seconds) / iterations
    per_sample = run.ranks / np.array([max(step.segments, 1) for step in steps])
    place = f"learner.{channel.lower()}"
    said = f"{len(steps)} steps of channel {other if borrowed else channel}"
    sources[f"{place}.learn"] = f"time/learn_s over packs and tokens of {said}"
    learn = LearnSpeed(forward_s=forward_s, token_s=token_s)
    if run.asynchronous and steps[0].channel == "B":
        sources[f"{place}.target_s, pack_s"] = "default: packs were made beside the steps"
        return ChannelSpeeds(learn=learn)
    sources[f"{place}.target_s, pack_s"] = f"medians of time/target_s, time/pack_s of {said}"
    return ChannelSpeeds(
        target_s=_median([s.seconds("target") for s in steps] * per_sample),
        pack_s=_median([s.seconds("pack") for s in steps] * per_sample),
        learn=learn,
    )


def _line(work: Array, seconds: Array) -> Array:
    """Seconds of each unit of work, none negative; work (N, 2), seconds (N,) -> (2,)."""
    start = np.median(seconds) / np.maximum(np.median(work, axis=0), _LEAST) / 2
    return _fitted(lambda speeds: work @ speeds, seconds, start)


def _fitted(model: Callable[[Array], Array], seconds: Array, start: Array) -> Array:
    """The positive numbers, K from `start` (K,), with which `model` gives `seconds`."""
    typical = max(float(np.median(seconds)), _LEAST)

    def misses(logs: Array) -> Array:
        apart = (model(start * np.exp(logs)) - seconds) / typical
        # soft_l1, by hand, so that the prior stays square
        robust = _TYPICAL * np.sqrt(2 * (np.sqrt(1 + (apart / _TYPICAL) ** 2) - 1))
        return np.concatenate([robust * np.sign(apart), _PRIOR * logs])

    found = least_squares(misses, np.zeros(len(start)), diff_step=0.02, xtol=1e-4)
    return np.asarray(start * np.exp(found.x))


def _update(run: LoggedRun, sources: dict[str, str]) -> float:
    if run.seconds is None or run.config.training.eval_strategy != "no":
        why = "the run has not ended" if run.seconds is None else "the run evaluated in between"
        sources["learner.update_s"] = f"default: {why}"
        return LearnerSpeed().update_s
    in_steps = sum(step.seconds("step") for step in run.all_steps)
    sources["learner.update_s"] = "train_runtime less time/step_s; checkpoints are in it"
    return max(0.0, run.seconds - in_steps) / len(run.all_steps)


def _push(run: LoggedRun, sources: dict[str, str]) -> PushSpeed:
    steps = [step for step in run.of("B") if "sync/bytes" in step.metrics]
    if not steps:
        sources["push"] = "default: no push is logged"
        return PushSpeed()
    sources["push"] = f"medians of time/push_s, sync/bytes, sync/gb_per_s of {len(steps)} steps"
    gigabytes = _median([step.metrics["sync/bytes"] / 1e9 for step in steps])
    gb_per_s = max(_median([step.metrics["sync/gb_per_s"] for step in steps]), _LEAST)
    whole = _median([step.seconds("push") for step in steps])
    fixed = max(0.0, whole - gigabytes / gb_per_s)
    return PushSpeed(fixed_s=fixed, gigabytes=gigabytes, gb_per_s=gb_per_s)


def _engine(run: LoggedRun, known: Speeds, sources: dict[str, str]) -> EngineSpeed:
    """known: the speeds of all else; a slow learner waits less for the answers."""
    steps = run.answered[-_MOST_STEPS:]
    if not steps or run.asynchronous:
        why = "no answers are logged" if not steps else "answers were made beside the steps"
        sources["engine"] = f"default: {why}"
        return EngineSpeed()
    sources["engine"] = f"time/rollout_s and the lengths of the answers of {len(steps)} steps"
    seconds = np.array([step.seconds("rollout") for step in steps])

    def simulated(speeds: Array) -> Array:
        given = known.model_copy(update={"engine": _engine_of(speeds)})
        return np.array([_rollout_seconds(run, step, given) for step in steps])

    units = [np.median(simulated(np.eye(4)[k] + _LEAST)) for k in range(4)]
    start = np.median(seconds) * np.array(_FRACTIONS) / np.maximum(units, _LEAST)
    return _engine_of(_fitted(simulated, seconds, start))


def _engine_of(speeds: Array) -> EngineSpeed:
    """speeds: seconds of a call, of a prompt token, of a step, of a sequence in a step."""
    call_s, token_s, step_s, per_sequence_s = map(float, speeds)
    return EngineSpeed(
        call_s=call_s,
        prefill_tokens_per_s=1 / token_s,
        step_s=step_s,
        step_per_sequence_s=per_sequence_s,
    )


def _rollout_seconds(run: LoggedRun, step: LoggedStep, speeds: Speeds) -> float:
    """The phase `rollout` of a logged step, on simulated machines."""
    machines, capacity = Machines(setting_of(run, speeds)), run.config.global_max_length
    tokens = iter(_tokens(step))
    clocks = [Clock(machines.env) for _ in step.rollouts]
    for rank, (rollouts, clock) in enumerate(zip(step.rollouts, clocks, strict=True)):
        own = [
            each._replace(corrected=max(1, min(each.corrected, capacity - each.prompt)))
            for each in islice(tokens, len(rollouts))
        ]
        record = SimulatedStep(0, "B")
        machines.env.process(Rank(machines, rank, [record]).channel_b(own, record, clock))
    machines.env.run()
    return max(clock.seconds["rollout"] for clock in clocks)


def setting_of(run: LoggedRun, speeds: Speeds) -> Setting:
    """What simulates the logged run itself, but for its lengths."""
    servers = declared_servers(run.config)
    return Setting(run.config, speeds, Pool([], 0, 0), servers=servers, ranks=run.ranks)


def _median(values: "Sequence[float] | Array") -> float:
    return float(median(values))
