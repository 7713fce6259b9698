"""Asynchronous mode on a clock: `learner.async_rollout`, whose shelf and parts it runs.

prefetcher   a share -> round by round, while the gate is open -> packs -> ReadyQueue
learner      begin(): a push, if one is due; then take() for channel B or A
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from simpy import Environment, Event

from learner.async_rollout.parts import Parts
from learner.async_rollout.queue import ReadyQueue, ReadyShare
from learner.async_rollout.shares import Shares
from learner.async_rollout.shelf import Shelf
from learner.packing import Chunk
from learner.simulate.chunks import Bench, Clock, Length, Making
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
        self._shelf = Shelf(
            Shares(0, machines.setting.run_steps),
            ReadyQueue[MadeShare](settings.queue_limit, settings.version_window),
            settings.prefetch_target_packs,
        )
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
        record.ready += self._shelf.packs

    def is_ready(self) -> Generator[Event, Any, bool]:
        """Every rank has a share that is fresh enough."""
        self._refresh()
        return all((yield from self._machines.peers.share(self._rank, self._shelf.has_ready())))

    def take(self, record: SimulatedStep) -> MadeShare:
        """What channel B trains on."""
        made = self._shelf.take(record.step)
        self._notify()
        record.add_packs(made.counts)
        return made

    def take_unanswered(self, record: SimulatedStep) -> int:
        """What channel A trains on."""
        share = self._shelf.take_unanswered(record.step)
        self._notify()
        return share

    def end(self, record: SimulatedStep) -> None:
        """After a step: the training weights have changed."""
        self._updates += 1
        record.stale += self._shelf.dropped_stale
        record.overflowed += self._shelf.dropped_oldest
        self._shelf.dropped_stale = self._shelf.dropped_oldest = 0

    def _push(self) -> Wait:
        self._open = False
        while self._asking:
            yield self._changed
        yield from self._machines.peers.share(self._rank)
        yield from self._machines.push()
        self._version += 1
        self._updates = 0
        self._open = True
        self._refresh()

    def _refresh(self) -> None:
        self._shelf.refresh(self._version)
        self._notify()

    def _prefetch(self) -> Wait:
        while True:
            while (share := self._shelf.begin()) is None:
                yield self._changed
            made = yield from self._make(share)
            self._shelf.put(made)
            self._notify()

    def _make(self, share: int) -> Generator[Event, Any, MadeShare]:
        """Round by round; a push between two rounds ends a part."""
        left = self._machines.samples(share, self._rank)
        counts = SimulatedStep(share, "B")
        bench = Bench(self._machines, Clock(self._env), counts)
        parts = Parts[Length, list[Length]](bench)
        size = self._machines.round_size or len(left)
        for start in range(0, len(left), size):
            asked = left[start : start + size]
            version = yield from self._ask(asked)
            parts.add(version, (yield from bench.segments(asked)))
        return MadeShare(share, parts.finished(), counts)

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

    def _notify(self) -> None:
        changed, self._changed = self._changed, self._env.event()
        changed.succeed()
