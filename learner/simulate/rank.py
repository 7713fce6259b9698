"""One learner process on a clock: `learner.step` and `learner.forwards`, with lengths for packs."""

from collections import deque
from collections.abc import Sequence

from learner.packing import forwards_due
from learner.schedule import channel_for_step
from learner.simulate.beside import Beside, Ready
from learner.simulate.chunks import Ahead, Bench, Chunks, Clock, Rounds, Whole
from learner.simulate.engines import Wait
from learner.simulate.lengths import Tokens
from learner.simulate.machines import Machines
from learner.simulate.outcome import SimulatedStep
from learner.types import Channel

# An answer without objects, and its end: what a rank that has no packs replays after a prompt.
_EMPTY_ANSWER = 3


class Rank:
    """Runs all steps. records: one for each of them, which all ranks write."""

    def __init__(self, machines: Machines, rank: int, records: Sequence[SimulatedStep]) -> None:
        self._machines = machines
        self._env = machines.env
        self._peers = machines.peers
        self._rank = rank
        self._records = records
        self._speeds = machines.setting.speeds.learner
        self.busy_s = 0.0
        asynchronous = machines.setting.config.rollout_matching.async_rollout.enabled
        self._beside = Beside(machines, rank) if asynchronous else None

    def run(self) -> Wait:
        for record in self._records:
            clock = Clock(self._env)
            with clock.phase("step"):
                if self._beside is None:
                    yield from self._step(record, clock)
                else:
                    yield from self._step_beside(self._beside, record, clock)
            self._note(record, clock)
            yield from self._peers.share(self._rank)
            record.update_s = self._speeds.update_s
            self.busy_s += record.update_s
            yield self._env.timeout(record.update_s)

    def _step(self, record: SimulatedStep, clock: Clock) -> Wait:
        """Step mode: the rollouts of channel B are made within the step."""
        record.channel = self._wanted(record)
        yield from self._peers.share(self._rank)
        if record.channel == "A":
            yield from self._channel_a(record.step, record, clock)
            return
        with clock.phase("push"):
            yield from self._peers.share(self._rank)
            yield from self._machines.push()
        samples = self._machines.samples(record.step, self._rank)
        bench = Bench(self._machines, clock, record)
        rounds = Rounds(self._machines, self._rank, bench, clock, samples)
        ahead = self._machines.round_size is not None
        chunks = Ahead(self._env, rounds) if ahead else rounds
        yield from self._learn(chunks, samples, record, clock)

    def _step_beside(self, beside: Beside, record: SimulatedStep, clock: Clock) -> Wait:
        """Asynchronous mode: the rollouts are there, or channel A takes the step."""
        yield from beside.begin(record, clock)
        if self._wanted(record) == "B":
            ready = yield from beside.is_ready()
            record.channel, record.skipped = ("B", False) if ready else ("A", True)
        if record.channel == "B":
            made = beside.take(record)
            samples = self._machines.samples(made.share, self._rank)
            yield from self._learn(Ready(self._env, made), samples, record, clock)
        else:
            yield from self._channel_a(beside.take_unanswered(record), record, clock)
        beside.end(record)

    def _wanted(self, record: SimulatedStep) -> Channel:
        return channel_for_step(record.step, self._machines.setting.config.b_ratio)

    def _channel_a(self, share: int, record: SimulatedStep, clock: Clock) -> Wait:
        samples = self._machines.samples(share, self._rank)
        bench = Bench(self._machines, clock, record)
        yield from self._learn(Whole(bench, samples), samples, record, clock)

    def _learn(
        self, chunks: Chunks, samples: Sequence[Tokens], record: SimulatedStep, clock: Clock
    ) -> Wait:
        """Forwards and backwards, as many on every rank (DDP-02)."""
        record.samples += len(samples)
        ready, tokens = deque[int](), samples[0].prompt + _EMPTY_ANSWER
        over = unsynced = False
        while not over:
            with clock.phase("wait"):
                packs, last = yield from chunks.next()
                ready.extend(sum(map(len, pack)) for pack in packs)
                said = yield from self._peers.share(self._rank, (len(ready), last))
            counts, ended = zip(*said, strict=True)
            due, over = forwards_due(counts, ended, unsynced), all(ended)
            unsynced = unsynced or due > 0
            with clock.phase("learn"):
                for _ in range(due):
                    record.forwards += 1
                    record.replays += not ready
                    tokens = ready.popleft() if ready else tokens
                    yield from self._forward(record.channel, tokens)
        with clock.phase("learn"):
            yield from self._synchronize()

    def _forward(self, channel: Channel, tokens: int) -> Wait:
        learn = (self._speeds.a if channel == "A" else self._speeds.b).learn
        own = self._machines.setting.config.stage2_ab
        iterations = own.n_softctx_iter if own is not None and channel == "A" else 1
        seconds = iterations * (learn.forward_s + learn.token_s * tokens)
        self.busy_s += seconds
        yield self._env.timeout(seconds)

    def _synchronize(self) -> Wait:
        """Gradients, at the end of the last backward."""
        if self._peers.count > 1:
            yield from self._peers.share(self._rank)
            yield self._env.timeout(self._speeds.sync_s)

    def _note(self, record: SimulatedStep, clock: Clock) -> None:
        """Seconds are those of the slowest rank, phase by phase, as in the metrics."""
        seconds = dict(clock.seconds)
        record.seconds = max(record.seconds, seconds.pop("step"))
        for phase, value in seconds.items():
            record.phases[phase] = max(record.phases.get(phase, 0.0), value)
