"""Step mode: the rollouts of a channel-B step are made within it, by the newest weights.

    push -> samples, chunk by chunk -> RolloutOutput -> Segment -> Pack

A chunk is what the servers decode at once for this rank (DIST-04). Where they are dedicated,
the next chunk is made while the last one is learned (STEP-03).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from learner.channels.b import ChannelB
from learner.channels.rollout_stats import RolloutStats
from learner.metrics import Payload, PhaseClock
from learner.model.packed_forward import Pack
from learner.packer import Packer
from learner.rollout.policy import Policy
from learner.rollout.seeds import rank_seed_base, request_seed, rollout_seed_base
from learner.types import Sample


class PackFeed(Protocol):
    """The packs of one channel-B step of this rank."""

    @property
    def overlaps(self) -> bool:
        """Its chunks may be made while others are learned."""

    def chunks(self) -> Iterator[Sequence[Pack]]:
        """All packs, in parts; iterated once."""

    def payload(self) -> Payload:
        """What was counted, once the chunks are over."""


class RolloutSource(Protocol):
    """Where channel B has its packs from, and what its steps leave for channel A."""

    def ready(self, step: int) -> bool:
        """Whether this rank could run channel B in step `step`."""

    def samples(self, own: Sequence[Sample]) -> Sequence[Sample]:
        """What channel A trains on in a step whose samples are `own`."""

    def feed(self, step: int, own: Sequence[Sample], clock: PhaseClock) -> PackFeed:
        """The packs of channel-B step `step`. clock: times their phases."""

    def mark_updated(self) -> None:
        """The training weights have changed."""


class InStep:
    """The source of step mode. rank: of this process. seed: `training.seed`."""

    def __init__(
        self, policy: Policy, channel_b: ChannelB, packer: Packer, seed: int, rank: int = 0
    ) -> None:
        self._policy = policy
        self._channel_b = channel_b
        self._packer = packer
        self._seed = seed
        self._rank = rank

    def ready(self, step: int) -> bool:
        return True

    def samples(self, own: Sequence[Sample]) -> Sequence[Sample]:
        return own

    def feed(self, step: int, own: Sequence[Sample], clock: PhaseClock) -> "StepFeed":
        """Brings the newest weights to who generates, first."""
        with clock.phase("push"):
            self._policy.push_if_stale()
        base = rank_seed_base(rollout_seed_base(self._seed, step), self._rank)
        return StepFeed(self._policy, self._channel_b, self._packer, base, own, clock)

    def mark_updated(self) -> None:
        self._policy.mark_updated()


class StepFeed:
    """Rolls out the samples of one step; sample i is decoded with the seed of request i."""

    def __init__(
        self,
        policy: Policy,
        channel_b: ChannelB,
        packer: Packer,
        seed_base: int,
        samples: Sequence[Sample],
        clock: PhaseClock,
    ) -> None:
        self._policy = policy
        self._channel_b = channel_b
        self._seed_base = seed_base
        self._samples = samples
        self._clock = clock
        self._packs = packer.begin()
        self._stats = RolloutStats()

    @property
    def overlaps(self) -> bool:
        return self._policy.round_size is not None

    def chunks(self) -> Iterator[Sequence[Pack]]:
        size = self._policy.round_size or max(len(self._samples), 1)
        for start in range(0, len(self._samples), size):
            samples = self._samples[start : start + size]
            with self._clock.phase("rollout"):
                seed = request_seed(self._seed_base, 0, start)
                rollouts = self._policy.answer(samples, seed)
            with self._clock.phase("target"):
                segments, stats = self._channel_b.segments(samples, rollouts)
                self._stats.merge(stats)
            with self._clock.phase("pack"):
                last = start + size >= len(self._samples)
                packs = self._packs.rest(segments) if last else self._packs.add(segments)
            yield packs

    def payload(self) -> Payload:
        payload = self._stats.payload()
        payload.merge(self._packs.payload())
        answered = (len(self._samples), self._clock.seconds("rollout"))
        payload.rate({"rollout/per_second": answered})
        return payload
