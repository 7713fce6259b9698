"""What a simulation found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

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

    def add_packs(self, other: "SimulatedStep") -> None:
        """Take over what was counted of the packs of a share."""
        self.segments += other.segments
        self.tokens += other.tokens
        self.room += other.room


@dataclass(frozen=True)
class ServerUse:
    """busy: share of the time in which an engine runs. running: mean sequences while it does."""

    busy: float
    running: float
    tokens_per_s: float


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
