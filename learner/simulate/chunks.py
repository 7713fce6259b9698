"""The packs of one step of one rank, in parts, as `learner.step` and `in_step` make them."""

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from simpy import Environment, Event, Store

from learner.packing import Chunk, CountedPacking
from learner.simulate.engines import Wait
from learner.simulate.lengths import Tokens
from learner.simulate.machines import Machines
from learner.simulate.outcome import SimulatedStep


@dataclass(frozen=True)
class Length:
    """A segment, as its length."""

    sample_id: str
    tokens: int

    def __len__(self) -> int:
        return self.tokens


Packs = list[list[Length]]
# A part of a simulated process that ends with packs.
Making = Generator[Event, Any, Chunk[list[Length]]]


class Clock:
    """Seconds of each phase, as `learner.metrics.PhaseClock` has them."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = self._env.now
        yield
        self.seconds[name] += self._env.now - began


class Chunks(Protocol):
    def next(self) -> Making:
        """The next part, until the last."""


class Bench:
    """Where one rank makes segments and packs of the samples of one share.

    record: says for which channel, and takes the counts of the packs.
    """

    def __init__(self, machines: Machines, clock: Clock, record: SimulatedStep) -> None:
        config = machines.setting.config
        learner = machines.setting.speeds.learner
        self._env = machines.env
        self._clock = clock
        self._record = record
        self._capacity = config.global_max_length
        self._speeds = learner.a if record.channel == "A" else learner.b
        self._packing = CountedPacking[Length](config.training, config.global_max_length)

    def make(self, samples: Sequence[Tokens], last: bool) -> Generator[Event, Any, Packs]:
        """Segments, and packs of them. last: no more samples come, so nothing is to wait."""
        segments = yield from self.segments(samples)
        return self.chunk(segments, last=last)

    def segments(self, samples: Sequence[Tokens]) -> Generator[Event, Any, list[Length]]:
        """Takes the time of packing them, too."""
        with self._clock.phase("target"):
            yield self._env.timeout(len(samples) * self._speeds.target_s)
        with self._clock.phase("pack"):
            yield self._env.timeout(len(samples) * self._speeds.pack_s)
        return [self._segment(tokens) for tokens in samples]

    def chunk(self, segments: Sequence[Length], *, last: bool) -> Packs:
        """Packs as `StepPacks` makes them, counted."""
        packs = self._packing.chunk(segments, last=last)
        self._record.segments += sum(map(len, packs))
        self._record.tokens += sum(len(segment) for pack in packs for segment in pack)
        self._record.room += len(packs) * self._capacity
        return packs

    def _segment(self, tokens: Tokens) -> Length:
        taught = tokens.target if self._record.channel == "A" else tokens.corrected
        return Length("drawn by the simulation", tokens.prompt + taught)


class Whole:
    """Channel A: everything at once."""

    def __init__(self, bench: Bench, samples: Sequence[Tokens]) -> None:
        self._bench = bench
        self._samples = samples

    def next(self) -> Making:
        return Chunk((yield from self._bench.make(self._samples, last=True)), True)


class Rounds:
    """Channel B in step mode: what is asked at once is a part."""

    def __init__(
        self, machines: Machines, rank: int, bench: Bench, clock: Clock, samples: Sequence[Tokens]
    ) -> None:
        self._machines = machines
        self._rank = rank
        self._bench = bench
        self._clock = clock
        self._left = list(samples)

    def next(self) -> Making:
        size = self._machines.round_size or len(self._left)
        asked, self._left = self._left[:size], self._left[size:]
        with self._clock.phase("rollout"):
            yield from self._machines.answer(self._rank, asked)
        last = not self._left
        return Chunk((yield from self._bench.make(asked, last)), last)


class Ahead:
    """Parts made beside what uses them, through a queue of one, as `learner.overlap` does."""

    def __init__(self, env: Environment, chunks: Chunks) -> None:
        self._queue = Store(env, capacity=1)
        self._chunks = chunks
        env.process(self._produce())

    def _produce(self) -> Wait:
        over = False
        while not over:
            chunk = yield from self._chunks.next()
            over = chunk.last
            yield self._queue.put(chunk)

    def next(self) -> Making:
        chunk: Chunk[list[Length]] = yield self._queue.get()
        return chunk
