"""Step mode: the rollouts of a channel-B step are made within it, by the newest weights.

    push -> samples, chunk by chunk -> RolloutOutput -> Segment -> Pack

A chunk is what the servers decode at once for this rank (DIST-04). Where they are dedicated,
the next chunk is made while the last one is learned (STEP-03).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from learner.channels.b import ChannelB
from learner.channels.rollout_stats import RolloutStats
from learner.metrics import Payload, PhaseClock
from learner.model.packed_forward import Pack
from learner.packer import Packer
from learner.packing import Chunk, Place
from learner.rollout.policy import Policy
from learner.rollout.seeds import rank_seed_base, request_seed, rollout_seed_base
from learner.rollout_log import Judged
from learner.types import Sample

# Takes what became of the answers of a step, and where the segments of those with a target went.
LogRollouts = Callable[[int, Sequence[Judged], Sequence[Place]], None]


class PackFeed(Protocol):
    """The packs of one channel-B step of this rank."""

    @property
    def overlaps(self) -> bool:
        """Its chunks may be made while others are learned."""

    def chunks(self) -> Iterator[Chunk[Pack]]:
        """All packs, in parts; iterated once."""

    def payload(self) -> Payload:
        """What was counted, once the chunks are over."""


class RolloutSource(Protocol):
    """Where channel B has its packs from, and what its steps leave for channel A."""

    @property
    def beside(self) -> bool:
        """Answers are asked for beside the steps, those of channel A too."""

    def begin(self, step: int, clock: PhaseClock) -> None:
        """Before step `step`, of any channel. clock: times a push."""

    def ready(self, step: int) -> bool:
        """Whether this rank could run channel B in step `step`."""

    def samples(self, step: int, own: Sequence[Sample]) -> Sequence[Sample]:
        """What channel A trains on in step `step`, for which the loader has `own`."""

    def feed(self, step: int, own: Sequence[Sample], clock: PhaseClock) -> PackFeed:
        """The packs of channel-B step `step`. clock: times their phases."""

    def payload(self) -> Payload:
        """What was counted beside the packs since the last step."""

    def quiet(self) -> AbstractContextManager[None]:
        """Nobody else asks or pushes within; every process enters it at the same point."""

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint of this process: what a run that goes on has to know."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`, before the first step."""

    def close(self) -> None:
        """Ask no more."""


class InStep:
    """The source of step mode. rank: of this process. seed: `training.seed`.

    log_rollouts: called once in every step.
    """

    beside = False

    def __init__(
        self,
        policy: Policy,
        channel_b: ChannelB,
        packer: Packer,
        seed: int,
        rank: int = 0,
        log_rollouts: LogRollouts | None = None,
    ) -> None:
        self._policy = policy
        self._channel_b = channel_b
        self._packer = packer
        self._seed = seed
        self._rank = rank
        self._log_rollouts = log_rollouts

    def ready(self, step: int) -> bool:
        return True

    def begin(self, step: int, clock: PhaseClock) -> None:
        return

    def samples(self, step: int, own: Sequence[Sample]) -> Sequence[Sample]:
        return own

    def feed(self, step: int, own: Sequence[Sample], clock: PhaseClock) -> "StepFeed":
        """Brings the newest weights to who generates, first."""
        with clock.phase("push"):
            self._policy.push_if_stale()
        base = rank_seed_base(rollout_seed_base(self._seed, step), self._rank)
        log = None if self._log_rollouts is None else partial(self._log_rollouts, step + 1)
        return StepFeed(self._policy, self._channel_b, self._packer, base, own, clock, log)

    def payload(self) -> Payload:
        return Payload()

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        return

    def close(self) -> None:
        return


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
        log: Callable[[Sequence[Judged], Sequence[Place]], None] | None = None,
    ) -> None:
        self._policy = policy
        self._channel_b = channel_b
        self._log = log
        self._seed_base = seed_base
        self._samples = samples
        self._clock = clock
        self._packs = packer.begin()
        self._stats = RolloutStats()

    @property
    def overlaps(self) -> bool:
        return self._policy.round_size is not None

    def chunks(self) -> Iterator[Chunk[Pack]]:
        size = self._policy.round_size or max(len(self._samples), 1)
        judged: list[Judged] = []
        for number, start in enumerate(range(0, len(self._samples), size)):
            samples = self._samples[start : start + size]
            with self._clock.phase("rollout"):
                seed = request_seed(self._seed_base, 0, start)
                rollouts = self._policy.answer(samples, seed)
            with self._clock.phase("target"):
                noted: list[Judged] = []
                segments, stats = self._channel_b.segments(samples, rollouts, noted.append)
                self._stats.merge(stats)
                judged += [each._replace(chunk=number) for each in noted]
            with self._clock.phase("pack"):
                last = start + size >= len(self._samples)
                packs = self._packs.chunk(segments, last=last)
            if last and self._log is not None:
                self._log(judged, self._packs.places)
            yield Chunk(packs, last)

    def payload(self) -> Payload:
        payload = self._stats.payload()
        payload.merge(self._packs.payload())
        answered = (len(self._samples), self._clock.seconds("rollout"))
        payload.rate({"rollout/per_second": answered})
        payload.note({"sync/weights_version": self._policy.version})
        return payload
