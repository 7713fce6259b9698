"""The first steps of a run on simulated machines: `training.step` and `training.rollout_buffer`,
with lengths in the place of packs.

Rank         step mode: chunks of rollouts -> segments -> packs -> forwards, at the same time
AsyncRank    rollouts of later batches beside training, through the `RolloutBuffer` of a run
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from simpy import Environment, Event, Store

from learner.operate.simulate.engines import Answers, Machines, Wait
from learner.operate.simulate.inputs import Setting, Tokens
from learner.operate.simulate.outcome import Outcome, ServerUse, SimulatedStep
from learner.stages.packing import Chunk, Parts, StepPacker, forwards_due
from learner.stages.schedule import channel_for_step
from learner.training.rollout_buffer import ReadyBatch, RolloutBuffer
from learner.types import Channel

# An answer without objects, and its end: what a rank without packs replays after a prompt.
_EMPTY_ANSWER = 3


def simulate(setting: Setting) -> Outcome:
    """Run the simulation; the same setting gives the same numbers.

    Raises:
        ContractError: what a run would end with, such as a segment that no pack can hold.
    """
    setting.check()
    config, machines = setting.config, Machines(setting)
    asynchronous = config.rollout_matching.async_rollout.enabled
    records = [SimulatedStep(step, "A") for step in range(min(setting.steps, setting.run_steps))]
    kind = AsyncRank if asynchronous else Rank
    ranks = [kind(machines, rank, records) for rank in range(setting.ranks)]
    processes = [machines.env.process(rank.run()) for rank in ranks]
    machines.env.run(machines.env.all_of(processes))
    seconds = machines.env.now
    return Outcome(
        steps=records,
        run_steps=setting.run_steps,
        servers=[ServerUse.of(engines, seconds) for engines in machines.uses],
        learner_busy=sum(rank.busy_s for rank in ranks) / (seconds * setting.ranks),
        rollout_gpus=sum(setting.world_sizes) if machines.servers else 0,
        learner_gpus=setting.ranks,
        colocated=config.rollout_matching.backend == "colocate",
        asynchronous=asynchronous,
    )


@dataclass(frozen=True)
class Length:
    """A segment, as its length."""

    sample_id: str
    tokens: int

    def __len__(self) -> int:
        return self.tokens


Packs = list[list[Length]]


class Answered(NamedTuple):
    """A chunk or a round whose answers are there.

    version: of the weights, where several answer a batch.
    """

    samples: Sequence[Tokens]
    last: bool
    version: int = 0


# Parts of a simulated process that end with packs, and with answers.
Making = Generator[Event, Any, Chunk[list[Length]]]
Answering = Generator[Event, Any, Answered]


class Clock:
    """Seconds of each phase, as `learner.runs.metrics.PhaseClock` has them."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = self._env.now
        yield
        self.seconds[name] += self._env.now - began


class Bench:
    """Where one rank makes segments and packs of the samples of one batch.

    record: gives the channel, and takes the counts of the packs.
    """

    def __init__(self, machines: Machines, clock: Clock, record: SimulatedStep) -> None:
        config, learner = machines.setting.config, machines.setting.speeds.learner
        self._env = machines.env
        self._clock = clock
        self._record = record
        self._capacity = config.global_max_length
        self._speeds = learner.a if record.channel == "A" else learner.b
        self._packing = StepPacker[Length, list[Length]](config.training, self._capacity, list)

    def segments(self, samples: Sequence[Tokens]) -> Generator[Event, Any, list[Length]]:
        """Takes the time of packing them, too."""
        with self._clock.phase("target"):
            yield self._env.timeout(len(samples) * self._speeds.target_s)
        with self._clock.phase("pack"):
            yield self._env.timeout(len(samples) * self._speeds.pack_s)
        taught = [t.target if self._record.channel == "A" else t.corrected for t in samples]
        return [
            Length("drawn by the simulation", tokens.prompt + more)
            for tokens, more in zip(samples, taught, strict=True)
        ]

    def chunk(self, segments: Sequence[Length], *, last: bool) -> Packs:
        """Packs as a run makes them, counted."""
        packs = self._packing.chunk(segments, last=last)
        self._record.segments += sum(map(len, packs))
        self._record.tokens += sum(len(segment) for pack in packs for segment in pack)
        self._record.room += len(packs) * self._capacity
        return packs


def prefetched(env: Environment, make: Callable[[], Making | Answering]) -> Store:
    """A queue of one, filled until the last chunk beside its user, as `prefetch` does in a step."""
    queue = Store(env, capacity=1)

    def produce() -> Wait:
        over = False
        while not over:
            chunk = yield from make()
            over = chunk.last
            yield queue.put(chunk)

    env.process(produce())
    return queue


class Rank:
    """One learner process. records: one for each step, which all ranks write."""

    def __init__(self, machines: Machines, rank: int, records: Sequence[SimulatedStep]) -> None:
        self._machines = machines
        self._env = machines.env
        self._peers = machines.peers
        self._rank = rank
        self._records = records
        self._config = machines.setting.config
        self._speeds = machines.setting.speeds.learner
        self.busy_s = 0.0

    def run(self) -> Wait:
        for record in self._records:
            clock = Clock(self._env)
            with clock.phase("step"):
                yield from self._step(record, clock)
            # Of the slowest rank, phase by phase, as in the metrics.
            record.seconds = max(record.seconds, clock.seconds.pop("step"))
            for phase, seconds in clock.seconds.items():
                record.phases[phase] = max(record.phases.get(phase, 0.0), seconds)
            yield from self._peers.all_gather(self._rank)
            record.update_s = self._speeds.update_s
            yield from self._busy(record.update_s)

    def _step(self, record: SimulatedStep, clock: Clock) -> Wait:
        record.channel = self._wanted(record)
        yield from self._peers.all_gather(self._rank)
        if record.channel == "A":
            yield from self._channel_a(record.step, record, clock)
            return
        with clock.phase("push"):
            yield from self._peers.all_gather(self._rank)
            yield from self._machines.push()
        samples = self._machines.samples(record.step, self._rank)
        yield from self.channel_b(samples, record, clock)

    def channel_b(self, samples: Sequence[Tokens], record: SimulatedStep, clock: Clock) -> Wait:
        """A step of channel B from its first request to its last backward."""
        bench = Bench(self._machines, clock, record)
        left = deque(self._machines.chunks(self._rank, samples))

        def answer() -> Answering:
            asked, answers = left.popleft()
            with clock.phase("rollout"):
                yield from answers
            return Answered(asked, not left)

        answered = prefetched(self._env, answer)

        def make() -> Making:
            samples, last, _ = yield answered.get()
            segments = yield from bench.segments(samples)
            return Chunk(bench.chunk(segments, last=last), last)

        yield from self._learn(prefetched(self._env, make), samples, record, clock)

    def _wanted(self, record: SimulatedStep) -> Channel:
        return channel_for_step(record.step, self._config.b_ratio)

    def _channel_a(self, batch: int, record: SimulatedStep, clock: Clock) -> Wait:
        samples = self._machines.samples(batch, self._rank)
        bench = Bench(self._machines, clock, record)

        def make() -> Making:
            segments = yield from bench.segments(samples)
            return Chunk(bench.chunk(segments, last=True), True)

        yield from self._learn(prefetched(self._env, make), samples, record, clock)

    def _learn(
        self, chunks: Store, samples: Sequence[Tokens], record: SimulatedStep, clock: Clock
    ) -> Wait:
        """Forwards and backwards, as many on every rank (DDP-02)."""
        own = self._config.stage2_ab
        learn = (self._speeds.a if record.channel == "A" else self._speeds.b).learn
        iterations = own.n_softctx_iter if own is not None and record.channel == "A" else 1
        record.samples += len(samples)
        ready, tokens = deque[int](), samples[0].prompt + _EMPTY_ANSWER
        over = unsynced = False
        while not over:
            with clock.phase("wait"):
                packs, last = yield chunks.get()
                ready.extend(sum(map(len, pack)) for pack in packs)
                gathered = yield from self._peers.all_gather(self._rank, (len(ready), last))
            counts, ended = zip(*gathered, strict=True)
            due, over = forwards_due(counts, ended, unsynced), all(ended)
            unsynced = unsynced or due > 0
            with clock.phase("learn"):
                for _ in range(due):
                    record.forwards += 1
                    record.replays += not ready
                    tokens = ready.popleft() if ready else tokens
                    yield from self._busy(iterations * (learn.forward_s + learn.token_s * tokens))
        if self._peers.count > 1:
            with clock.phase("learn"):  # gradients, at the end of the last backward
                yield from self._peers.all_gather(self._rank)
                yield self._env.timeout(self._speeds.sync_s)

    def _busy(self, seconds: float) -> Wait:
        self.busy_s += seconds
        yield self._env.timeout(seconds)


@dataclass(frozen=True)
class MadeBatch(ReadyBatch[list[Length]]):
    """counts: of its packs."""

    counts: SimulatedStep


class AsyncRank(Rank):
    """A rank whose rollouts are made beside its steps: a prefetcher answers round by round.

    A round is answered while the one before is assessed. A push waits for the round that is being
    answered, and the next round waits for the push.
    """

    def __init__(self, machines: Machines, rank: int, records: Sequence[SimulatedStep]) -> None:
        super().__init__(machines, rank, records)
        self._settings = settings = self._config.rollout_matching.async_rollout
        self._buffer = RolloutBuffer[MadeBatch](
            settings.queue_limit,
            settings.version_window,
            settings.prefetch_target_packs,
            machines.setting.run_steps,
        )
        self._buffer.start(0)
        self._version = 0
        self._updates = settings.sync_every_steps
        self._open = self._asking = False
        self._changed = self._env.event()
        self._env.process(self._prefetch())

    def _step(self, record: SimulatedStep, clock: Clock) -> Wait:
        """Where no batch is ready that is fresh enough, channel A takes the step."""
        yield from self._peers.all_gather(self._rank)
        if self._updates >= self._settings.sync_every_steps:
            with clock.phase("push"):
                yield from self._push()
        record.ready += self._buffer.packs
        if self._wanted(record) == "B":
            self._refresh()
            has = yield from self._peers.all_gather(self._rank, self._buffer.has_ready())
            record.channel, record.skipped = ("B", False) if all(has) else ("A", True)
        if record.channel == "B":
            made = self._buffer.take(record.step)
            self._notify()
            record.segments += made.counts.segments
            record.tokens += made.counts.tokens
            record.room += made.counts.room
            chunks = Store(self._env)
            chunks.put(Chunk(made.packs, True))
            samples = self._machines.samples(made.batch, self._rank)
            yield from self._learn(chunks, samples, record, clock)
        else:
            batch = self._buffer.take_unanswered(record.step)
            self._notify()
            yield from self._channel_a(batch, record, clock)
        self._updates += 1
        record.stale += self._buffer.dropped_stale
        record.overflowed += self._buffer.dropped_oldest
        self._buffer.dropped_stale = self._buffer.dropped_oldest = 0

    def _push(self) -> Wait:
        self._open = False
        while self._asking:
            yield self._changed
        yield from self._peers.all_gather(self._rank)
        yield from self._machines.push()
        self._version += 1
        self._updates = 0
        self._open = True
        self._refresh()

    def _refresh(self) -> None:
        self._buffer.refresh(self._version)
        self._notify()

    def _prefetch(self) -> Wait:
        while True:
            while (batch := self._buffer.begin_now()) is None:
                yield self._changed
            counts = SimulatedStep(batch, "B")
            bench = Bench(self._machines, Clock(self._env), counts)
            parts, over = Parts[list[Length]](bench), False
            samples = self._machines.samples(batch, self._rank)
            rounds = self._machines.rounds(self._rank, samples)
            answered = prefetched(self._env, partial(self._answer, deque(rounds)))
            while not over:
                samples, over, version = yield answered.get()
                parts.add(version, (yield from bench.segments(samples)))
            self._buffer.put(MadeBatch(batch, parts.finished(), counts))
            self._notify()

    def _answer(self, left: deque[Answers]) -> Answering:
        """The first of the rounds that are left, once no push is made."""
        asked, answers = left.popleft()
        while not self._open:
            yield self._changed
        self._asking, version = True, self._version
        yield from answers
        self._asking = False
        self._notify()
        return Answered(asked, not left, version)

    def _notify(self) -> None:
        changed, self._changed = self._changed, self._env.event()
        changed.succeed()
