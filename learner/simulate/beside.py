"""Asynchronous mode on a clock: `learner.async_rollout`, whose queue and shares it runs.

prefetcher   a share -> round by round, while the gate is open -> packs -> ReadyQueue
learner      begin(): a push, if one is due; then take() for channel B or A
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from simpy import Environment, Event

from learner.async_rollout.queue import Part, ReadyQueue, ReadyShare
from learner.async_rollout.shares import Shares
from learner.packing import Chunk
from learner.simulate.chunks import Bench, Clock, Length, Making, Packs
from learner.simulate.engines import Wait
from learner.simulate.lengths import Tokens
from learner.simulate.machines import Machines
from learner.simulate.outcome import SimulatedStep


@dataclass(frozen=True)
class MadeShare(ReadyShare[list[Length]]):
    """counts: of its packs."""

    counts: SimulatedStep


class Ready:
    """The packs of a share, all there."""

    def __init__(self, env: Environment, made: MadeShare) -> None:
        self._env = env
        self._packs = made.packs

    def next(self) -> Making:
        yield self._env.timeout(0)
        return Chunk(self._packs, True)


class Beside:
    """What one rank has made and makes ready."""

    def __init__(self, machines: Machines, rank: int) -> None:
        settings = machines.setting.config.rollout_matching.async_rollout
        self._machines = machines
        self._env = machines.env
        self._rank = rank
        self._settings = settings
        self._queue = ReadyQueue[MadeShare](settings.queue_limit, settings.version_window)
        self._shares = Shares(0, machines.setting.run_steps)
        self._largest = 1
        self._making: int | None = None
        self._stale = self._overflowed = 0
        self._version = 0
        self._updates = settings.sync_every_steps
        self._open = self._asking = False
        self._changed = self._env.event()
        self._env.process(self._prefetch())

    def begin(self, record: SimulatedStep, clock: Clock) -> Wait:
        """The boundary before a step, the same on every rank."""
        yield from self._machines.peers.share(self._rank)
        if self._updates >= self._settings.sync_every_steps:
            with clock.phase("push"):
                yield from self._push()
        record.ready += self._queue.packs

    def is_ready(self) -> Generator[Event, Any, bool]:
        """Every rank has a share that is fresh enough."""
        self._refresh()
        return all((yield from self._machines.peers.share(self._rank, len(self._queue) > 0)))

    def take(self, record: SimulatedStep) -> MadeShare:
        """What channel B trains on."""
        made = self._queue.take(record.step)
        self._trained(made.share)
        record.add_packs(made.counts)
        return made

    def take_unanswered(self) -> int:
        """What channel A trains on."""
        share = self._shares.claim()
        if share is None and (newest := self._queue.take_newest()) is not None:
            share = newest.share
        if share is None:
            share, self._making = self._making, None
        assert share is not None, "there are as many shares as steps"
        self._trained(share)
        return share

    def end(self, record: SimulatedStep) -> None:
        """After a step: the training weights have changed."""
        self._updates += 1
        record.stale += self._stale
        record.overflowed += self._overflowed
        self._stale = self._overflowed = 0

    def _push(self) -> Wait:
        self._open = False
        while self._asking:
            yield self._changed
        yield from self._machines.peers.share(self._rank)
        yield from self._machines.push()
        self._version += 1
        self._updates = 0
        self._refresh()
        self._open = True
        self._notify()

    def _prefetch(self) -> Wait:
        while True:
            while (share := self._claim()) is None:
                yield self._changed
            made = yield from self._make(share)
            if self._making == share:
                self._put(made)
            self._notify()

    def _claim(self) -> int | None:
        ready = self._queue.packs
        fits = ready == 0 or ready + self._largest <= self._settings.queue_limit
        if ready < self._settings.prefetch_target_packs and fits:
            self._making = self._shares.claim()
            return self._making
        return None

    def _make(self, share: int) -> Generator[Event, Any, MadeShare]:
        """Round by round; a push between two rounds ends a part."""
        left = self._machines.samples(share, self._rank)
        counts = SimulatedStep(share, "B")
        bench = Bench(self._machines, Clock(self._env), counts)
        parts: list[Part[list[Length]]] = []
        packs: Packs = []
        last: int | None = None
        size = self._machines.round_size or len(left)
        for start in range(0, len(left), size):
            asked = left[start : start + size]
            version = yield from self._ask(asked)
            if last is not None and last != version:
                parts.append(Part(last, [*packs, *bench.flush()]))
                packs = []
            last = version
            packs += yield from bench.make(asked, last=False)
        assert last is not None, "a share has samples"
        parts.append(Part(last, [*packs, *bench.flush()]))
        return MadeShare(share, parts, counts)

    def _ask(self, asked: Sequence[Tokens]) -> Generator[Event, Any, int]:
        """Returns the version that answers."""
        while not self._open:
            yield self._changed
        self._asking = True
        version = self._version
        yield from self._machines.answer(self._rank, asked)
        self._asking = False
        self._notify()
        return version

    def _put(self, made: MadeShare) -> None:
        self._making = None
        self._largest = max(self._largest, made.size)
        if self._queue.is_stale(made):
            self._stale += self._give_back([made])
        else:
            self._overflowed += self._give_back(self._queue.put(made))

    def _refresh(self) -> None:
        self._stale += self._give_back(self._queue.drop_stale(self._version))

    def _give_back(self, dropped: list[MadeShare]) -> int:
        """Returns how many packs that are."""
        for made in dropped:
            self._shares.give_back(made.share)
        self._notify()
        return sum(made.size for made in dropped)

    def _trained(self, share: int) -> None:
        self._shares.trained(share)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, self._env.event()
        changed.succeed()
