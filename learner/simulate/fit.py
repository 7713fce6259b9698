"""Speeds from a logged run.

Learner    least squares of `time/learn_s` over forwards and tokens, channel by channel
Engine     the speeds with which the simulated rollouts of the logged lengths take as long as
           `time/rollout_s` says
The rest   medians, and what is left of the whole run's time

Both fits weigh outliers down. What a log cannot tell apart, such as a call from the prompts that
every call has equally many of, stays near the shares in `_SHARES`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from learner.simulate.engines import Wait
from learner.simulate.lengths import Pool, Tokens
from learner.simulate.logged import LoggedRun, LoggedStep
from learner.simulate.machines import Machines, Setting, declared_servers
from learner.simulate.speeds import (
    ChannelSpeeds,
    EngineSpeed,
    LearnerSpeed,
    LearnSpeed,
    PushSpeed,
    ServerShape,
    Speeds,
)
from learner.types import Channel

Array = npt.NDArray[np.float64]

# Most steps whose rollouts are simulated again and again.
_MOST_STEPS = 40
# Beyond this share of a typical time, a difference weighs less than its square.
_TYPICAL = 0.1
# How much a logarithm's distance from where it started weighs, beside a relative error of 1.
_PRIOR = 0.01
# Of the time of a rollout: its calls, its prompts, the steps themselves, their sequences.
_SHARES = (0.01, 0.09, 0.8, 0.1)
_LEAST = 1e-9


@dataclass(frozen=True)
class Fitted:
    """Speeds, and what each was fitted from; `defaults`: those that were not."""

    speeds: Speeds
    sources: dict[str, str]


def fit(run: LoggedRun, server: ServerShape) -> Fitted:
    """Speeds of a run. server: the shape of its servers, which is not logged."""
    sources: dict[str, str] = {}
    learner = LearnerSpeed(
        a=_channel(run, "A", sources),
        b=_channel(run, "B", sources),
        update_s=_update(run, sources),
    )
    speeds = Speeds(
        engine=_engine(run, server, sources),
        server=server,
        learner=learner,
        push=_push(run, sources),
    )
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


def _engine(run: LoggedRun, server: ServerShape, sources: dict[str, str]) -> EngineSpeed:
    steps = run.answered[-_MOST_STEPS:]
    if not steps or run.asynchronous:
        why = "no answers are logged" if not steps else "answers were made beside the steps"
        sources["engine"] = f"default: {why}"
        return EngineSpeed()
    sources["engine"] = f"time/rollout_s and the lengths of the answers of {len(steps)} steps"
    seconds = np.array([step.seconds("rollout") for step in steps])

    def simulated(speeds: Array) -> Array:
        engine = _engine_of(speeds)
        return np.array([_rollout_seconds(run, step, engine, server) for step in steps])

    units = [np.median(simulated(np.eye(4)[k] + _LEAST)) for k in range(4)]
    start = np.median(seconds) * np.array(_SHARES) / np.maximum(units, _LEAST)
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


def _rollout_seconds(
    run: LoggedRun, step: LoggedStep, engine: EngineSpeed, server: ServerShape
) -> float:
    """The phase `rollout` of a logged step, on simulated engines."""
    speeds = Speeds(engine=engine, server=server)
    machines = Machines(setting_of(run, speeds))
    ends: list[float] = []

    def asking(rank: int, left: list[Tokens]) -> Wait:
        while left:
            size = machines.round_size or len(left)
            asked, left = left[:size], left[size:]
            yield from machines.answer(rank, asked)
        ends.append(machines.env.now)

    for rank, rollouts in enumerate(step.rollouts):
        tokens = [Tokens(prompt, answer, 1, 1) for prompt, answer in rollouts]
        machines.env.process(asking(rank, tokens))
    machines.env.run()
    return max(ends)


def setting_of(run: LoggedRun, speeds: Speeds) -> Setting:
    """What simulates the logged run itself, but for its lengths."""
    servers = declared_servers(run.config)
    return Setting(run.config, speeds, Pool([], 0, 0), servers=servers, ranks=run.ranks)


def _median(values: "Sequence[float] | Array") -> float:
    return float(median(values))
