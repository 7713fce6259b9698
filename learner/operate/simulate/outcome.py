"""The outcome of a simulation, as tables and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any, Self, get_args

from rich.table import Table

from learner.data.show import new_table
from learner.operate.simulate.engines import Use
from learner.operate.simulate.inputs import Values
from learner.runs.console import duration, fraction
from learner.types import Channel

PHASES = ("push", "rollout", "target", "pack", "wait", "learn")


@dataclass
class SimulatedStep:
    """One optimizer step over all ranks, with the numbers that `metrics.jsonl` has of it.

    seconds: as `time/step_s`, without the update. phases: of the rank where each took longest;
    made beside the step, where rollouts are ahead of training. update_s: until the next step.
    tokens, room: of the packs. In asynchronous mode: ready: packs of all ranks before the
    step; skipped: the schedule wanted channel B; stale, overflowed: packs dropped as too
    old, and for newer ones.
    """

    step: int
    channel: Channel
    seconds: float = 0.0
    update_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    forwards: int = 0
    replays: int = 0
    samples: int = 0
    segments: int = 0
    tokens: int = 0
    room: int = 0
    ready: int = 0
    skipped: bool = False
    stale: int = 0
    overflowed: int = 0


@dataclass(frozen=True)
class ServerUse:
    """busy: share of the time in which an engine runs. running: mean sequences while it does."""

    busy: float
    running: float
    tokens_per_s: float

    @classmethod
    def of(cls, engines: Sequence[Use], seconds: float) -> Self:
        busy = sum(use.busy_s for use in engines)
        return cls(
            busy=busy / (seconds * len(engines)),
            running=sum(use.decoded_s for use in engines) / busy if busy else 0.0,
            tokens_per_s=sum(use.tokens for use in engines) / seconds,
        )


@dataclass(frozen=True)
class Outcome:
    """steps: those simulated, from the first. run_steps: of the whole run.

    learner_busy: share of the time in which a rank runs forwards, backwards and updates.
    colocated: the learner has a GPU of its server's.
    """

    steps: Sequence[SimulatedStep]
    run_steps: int
    servers: Sequence[ServerUse]
    learner_busy: float
    rollout_gpus: int
    learner_gpus: int
    colocated: bool = False
    asynchronous: bool = False

    @property
    def gpus(self) -> int:
        """All that the run takes."""
        return self.rollout_gpus if self.colocated else self.rollout_gpus + self.learner_gpus

    def of(self, channel: Channel) -> list[SimulatedStep]:
        return [step for step in self.steps if step.channel == channel]

    def step_s(self, channel: Channel) -> float | None:
        """Mean seconds of the steps of a channel, the update left out; None: there are none."""
        steps = self.of(channel)
        return mean(step.seconds for step in steps) if steps else None

    def phase_s(self, channel: Channel, phase: str) -> float:
        return mean(step.phases.get(phase, 0.0) for step in self.of(channel))

    @property
    def seconds(self) -> float:
        """Of the simulated steps, updates included."""
        return sum(step.seconds + step.update_s for step in self.steps)

    @property
    def run_seconds(self) -> float:
        """Of the whole run at the same pace; evaluations and checkpoints come on top."""
        return self.seconds / len(self.steps) * self.run_steps

    @property
    def samples_per_s(self) -> float:
        return sum(step.samples for step in self.steps) / self.seconds

    @property
    def fill(self) -> float:
        """Tokens in the packs / room in them."""
        room = sum(step.room for step in self.steps)
        return sum(step.tokens for step in self.steps) / room if room else 0.0


_NONE = "-"
_RUN = ("GPUs", "A step", "B step", "samples/s", "per GPU", "whole run")
_ASYNC = ("ready", "skipped B", "stale", "dropped")


def outcome_tables(outcome: Outcome) -> Iterator[tuple[str, Table]]:
    """Tables with their titles."""
    steps = new_table("channel", "#steps", "#step", *(f"#{phase}" for phase in PHASES), "#update")
    work = new_table("channel", "#forwards", "#replays", "#samples", "#tokens", "#fill")
    for channel in get_args(Channel):
        if of := outcome.of(channel):
            phases = (outcome.phase_s(channel, phase) for phase in PHASES)
            seconds = (outcome.step_s(channel) or 0.0, *phases, of[0].update_s)
            steps.add_row(channel, str(len(of)), *map(_seconds, seconds))
            totals = (
                sum(getattr(step, name) for step in of) / len(of)
                for name in ("forwards", "replays", "segments", "tokens")
            )
            fill = fraction(
                sum(step.tokens for step in of), sum(step.room for step in of), places=0
            )
            work.add_row(channel, *(f"{total:.1f}" for total in totals), fill)
    yield f"The first {len(outcome.steps)} of {outcome.run_steps} steps", steps
    yield "Work", work
    generating = new_table("", "#busy", "#sequences at once", "#tokens/s")
    for number, use in enumerate(outcome.servers):
        name = f"server {number}" if outcome.rollout_gpus else f"rank {number}"
        generating.add_row(name, f"{use.busy:.0%}", f"{use.running:.1f}", f"{use.tokens_per_s:.0f}")
    generating.add_row("learning, mean of the ranks", f"{outcome.learner_busy:.0%}", _NONE, _NONE)
    yield "Who generates", generating
    if outcome.asynchronous:
        queue = new_table(*(f"#{name}" for name in _ASYNC))
        queue.add_row(*_of_queue(outcome))
        yield "Rollouts beside training", queue
    run = new_table(*(f"#{column}" for column in _RUN))
    run.add_row(*_of_run(outcome))
    yield "The run", run


def sweep_table(rows: Sequence[tuple[Values, Outcome]]) -> Table:
    """One row for each combination of values; servers, learner: how busy they are."""
    names = list(rows[0][0])
    asynchronous = any(outcome.asynchronous for _, outcome in rows)
    table = new_table(
        *(f"#{name}" for name in (*names, *_RUN, "servers", "learner", "fill")),
        *(f"#{name}" for name in _ASYNC if asynchronous),
    )
    for values, outcome in rows:
        busy = [use.busy for use in outcome.servers]
        table.add_row(
            *(f"{values[name]:g}" for name in names),
            *_of_run(outcome),
            fraction(sum(busy), len(busy), places=0),
            f"{outcome.learner_busy:.0%}",
            f"{outcome.fill:.0%}",
            *(_of_queue(outcome) if asynchronous else ()),
        )
    return table


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Every number of the tables, and each step."""
    return {
        "channels": {
            channel: {
                "steps": len(outcome.of(channel)),
                "step_s": outcome.step_s(channel),
                "phases_s": {phase: outcome.phase_s(channel, phase) for phase in PHASES},
            }
            for channel in get_args(Channel)
            if outcome.of(channel)
        },
        "run_steps": outcome.run_steps,
        "run_s": outcome.run_seconds,
        "samples_per_s": outcome.samples_per_s,
        "rollout_gpus": outcome.rollout_gpus,
        "learner_gpus": outcome.learner_gpus,
        "learner_busy": outcome.learner_busy,
        "fill": outcome.fill,
        "servers": [asdict(use) for use in outcome.servers],
        "steps": [asdict(step) for step in outcome.steps],
    }


def sources_table(sources: Mapping[str, str]) -> Table:
    """What each speed was fitted from."""
    table = new_table("speed", "from")
    for name, source in sources.items():
        table.add_row(name, source)
    return table


def _of_run(outcome: Outcome) -> list[str]:
    apart = f"{outcome.rollout_gpus}+{outcome.learner_gpus}"
    return [
        str(outcome.gpus) if outcome.colocated else apart,
        *(_seconds(outcome.step_s(channel)) for channel in get_args(Channel)),
        f"{outcome.samples_per_s:.2f}",
        f"{outcome.samples_per_s / outcome.gpus:.3f}",
        duration(outcome.run_seconds),
    ]


def _of_queue(outcome: Outcome) -> list[str]:
    steps = outcome.steps
    return [
        f"{sum(step.ready for step in steps) / len(steps):.1f}",
        *(
            str(sum(getattr(step, name) for step in steps))
            for name in ("skipped", "stale", "overflowed")
        ),
    ]


def _seconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds:.2f} s"
