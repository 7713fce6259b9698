"""Sources of channel-B packs. This module: rollouts generated within the step.

    push -> requests of all samples -> RolloutOutput, chunk by chunk -> Segment -> Pack

If the servers have GPUs of their own, a step has at least four chunks (`part_size`). A chunk has at
most as many samples as the servers decode at once for this rank (DIST-04). Three chunks are
processed at once: one is answered, one is assessed and packed, and one is learned (STEP-03).
Requests of later chunks are sent as soon as the servers have places (FULL-06). A thread pool
encodes the prompts of all chunks ahead. Other backends make one chunk.
"""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any, NamedTuple, TypeVar

from learner.config.schema import Config
from learner.models.packs import Pack, Segment, make_pack
from learner.rollout.distribution import rank_seed_base, request_seed, rollout_seed_base
from learner.rollout.parallel_calls import in_thread
from learner.rollout.policy import Policy
from learner.runs.metrics import Payload, PhaseClock, rollout_payload
from learner.stages.packing import Chunk, StepPacker
from learner.training.channels import ChannelB
from learner.types import AssessedRollout, Place, RolloutOutput, Sample

T = TypeVar("T")

# Takes the step, its assessed answers, and the pack of each segment.
LogRollouts = Callable[[int, Sequence[AssessedRollout], Sequence[Place]], None]

_POLL_S = 0.1


def begin_packs(config: Config) -> StepPacker[Segment, Pack]:
    return StepPacker(config.training, config.global_max_length, make_pack)


def whole_groups(parts: Iterable[list[T]], size: int) -> Generator[list[T], None, None]:
    """Yield the same items in parts of whole groups of `size`."""
    waiting: list[T] = []
    for part in parts:
        waiting += part
        whole = len(waiting) // size * size
        if whole:
            yield waiting[:whole]
            waiting = waiting[whole:]


class Answered(NamedTuple):
    """A part of a rank batch with its answers.

    version: of the weights that answered. last: the batch has no more answers.
    """

    samples: Sequence[Sample]
    rollouts: Sequence[RolloutOutput]
    version: int
    last: bool


@dataclass
class PackFeed:
    """The packs of one rank batch, made of its answers, part by part.

    seed_base: `rollout_seed_base` of its answers (SEED-01). clock: measures the phases of the
    batch. chunks: all packs, in parts; iterated once. assessed: all answers so far. version,
    oldest: of the newest and the oldest weights that answered.
    """

    channel_b: ChannelB
    packer: StepPacker[Segment, Pack]
    seed_base: int
    clock: PhaseClock
    chunks: Iterator[Chunk[Pack]] = field(default_factory=lambda: iter(()))
    assessed: list[AssessedRollout] = field(default_factory=list)
    version: int = 0
    oldest: int = 0

    def make(self, answered: Iterable[Answered]) -> Generator[Chunk[Pack], None, None]:
        """Yield the packs that can be made after each part; none mixes two versions."""
        for number, part in enumerate(answered):
            with self.clock.phase("target"):
                segments, found = self.channel_b.segments(part.samples, part.rollouts)
                self.assessed += [each._replace(chunk=number) for each in found]
            with self.clock.phase("pack"):
                made = self.packer.chunk(segments, last=part.last, version=part.version)
            self.version = part.version
            self.oldest = self.oldest or part.version
            yield Chunk(made, part.last)

    def payload(self) -> Payload:
        payload = rollout_payload(self.assessed)
        payload.merge(self.packer.payload())
        seconds = self.clock.seconds("rollout")
        payload.rate({"rollout/per_second": (len(self.assessed), seconds)})
        payload.note({"sync/weights_version": self.version})
        return payload


class RolloutSource:
    """The source of channel B's packs and of channel A's samples. Here: answers within the step.

    asynchronous: answers are requested in parallel with all steps.
    policy: None in a run without rollouts, which has no step of channel B. rank: of this process.
    log_rollouts: called once for every batch that is trained on.
    """

    asynchronous = False

    def __init__(
        self,
        config: Config,
        policy: Policy | None,
        channel_b: ChannelB,
        rank: int = 0,
        log_rollouts: LogRollouts | None = None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._channel_b = channel_b
        self._rank = rank
        self._log = log_rollouts

    def begin(self, step: int, clock: PhaseClock) -> None:
        """Prepare step `step` of any channel. clock: measures a push."""

    def ready(self, step: int) -> bool:
        """Return whether this rank can run channel B in step `step`."""
        return True

    def samples(self, step: int, own: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples of channel A in step `step`. own: those of the loader."""
        return own

    @contextmanager
    def feed(self, step: int, own: Sequence[Sample], clock: PhaseClock) -> Iterator[PackFeed]:
        """Provide the packs of channel-B step `step`. clock: measures their phases.

        Push the newest weights, then request answers. Sample i has the seed of request i.
        """
        policy = self._policy
        assert policy is not None, "a run with channel B has a policy"
        feed, samples = self._begin_batch(step, own, clock)
        overlapped: Any = prefetch if policy.backend.streams else nullcontext
        with self._channel_b.ahead(own), ExitStack() as serving:
            with clock.phase("push"):
                serving.enter_context(policy.backend.serving())
                policy.push_if_stale()
            with (
                overlapped(self._answers(feed, policy, samples, serving)) as answered,
                overlapped(self._chunks(step, feed, answered)) as feed.chunks,
            ):
                yield feed

    def payload(self) -> Payload:
        """Return further metrics since the last step."""
        return Payload()

    def exclusive_access(self) -> AbstractContextManager[None]:
        """Make no requests and pushes during the block. All processes enter it together."""
        return nullcontext()

    def state(self) -> dict[str, Any]:
        """Return the state of this process for a checkpoint, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`, before the first step."""

    def close(self) -> None:
        """Make no more requests."""

    def _begin_batch(
        self, number: int, own: Sequence[Sample], clock: PhaseClock
    ) -> tuple[PackFeed, list[Sample]]:
        """Return an empty feed of batch `number`, and the sample of each of its answers."""
        seed_base = rollout_seed_base(self._config.training.seed, number)
        feed = PackFeed(self._channel_b, begin_packs(self._config), seed_base, clock)
        return feed, [each for each in own for _ in range(self._channel_b.answers_per_sample)]

    def _seed_of(self, feed: PackFeed, request: int) -> int:
        return request_seed(rank_seed_base(feed.seed_base, self._rank), 0, request)

    def _log_answers(self, step: int, feed: PackFeed) -> None:
        if self._log is not None:
            self._log(step + 1, feed.assessed, feed.packer.places)

    def _answers(
        self, feed: PackFeed, policy: Policy, samples: Sequence[Sample], serving: ExitStack
    ) -> Generator[Answered, None, None]:
        """Yield the answers in parts of whole groups. serving: closed before the first forward."""
        stop, version = 0, policy.version
        with closing(policy.stream(samples, self._seed_of(feed, 0))) as stream:
            parts = whole_groups(stream, self._channel_b.answers_per_sample)
            while stop < len(samples):
                with feed.clock.phase("rollout"):
                    rollouts = next(parts)
                    start, stop = stop, stop + len(rollouts)
                    if last := stop == len(samples):
                        serving.close()
                yield Answered(samples[start:stop], rollouts, version, last)

    def _chunks(
        self, step: int, feed: PackFeed, answered: Iterable[Answered]
    ) -> Generator[Chunk[Pack], None, None]:
        for chunk in feed.make(answered):
            if chunk.last:
                self._log_answers(step, feed)
            yield chunk


@contextmanager
def prefetch(items: Generator[T, None, None]) -> Iterator[Iterator[T]]:
    """Iterate in a daemon thread, through a queue of one: one item waits while the next is made.

    The iterator raises what `items` raises. After the block the thread makes no further item and
    closes `items`. The block does not wait for an item that is being made.
    """
    queue: Queue[T | None] = Queue(maxsize=1)  # None: the end, or an error
    over = threading.Event()

    def put(item: T | None) -> None:
        while not over.is_set():
            with suppress(Full):
                queue.put(item, timeout=_POLL_S)
                return

    def produce() -> None:
        try:
            with closing(items):
                for item in items:
                    put(item)
                    if over.is_set():
                        return
        finally:
            put(None)

    def taken() -> Iterator[T]:
        while not over.is_set():
            with suppress(Empty):
                if (item := queue.get(timeout=_POLL_S)) is None:
                    producer.result()
                    return
                yield item

    producer = in_thread(produce, "rollouts ahead")
    try:
        yield taken()
    finally:
        over.set()
