"""Asynchronous rollouts: channel B's packs from answers requested beside training (ASYNC-01).

    every step    begin()    an error of the prefetcher ends the run; a push, if one is due
    channel B     ready(), feed()    the oldest batch that is ready
    channel A     samples()          the next batch without answers

    prefetcher    begin() -> make() -> put(), of the RolloutBuffer
                  batch -> Sample -> RolloutOutput -> Segment -> Pack, by one version of the weights

A step does not use the samples of the Trainer's loader, but as many of its own: each batch of the
run is trained on once, with any timing. In the last steps channel A trains on the batches whose
answers are late.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any

from learner.config.schema import Config
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.rollout.backend import PushNeeded
from learner.rollout.parallel_calls import in_thread
from learner.rollout.policy import Policy
from learner.runs.metrics import Payload, PhaseClock
from learner.stages.packing import Chunk
from learner.training.channels import ChannelB
from learner.training.rollout_buffer import BufferClosed, ReadyBatch, RolloutBuffer
from learner.training.synchronous_rollouts import (
    Answered,
    LogRollouts,
    PackFeed,
    RolloutSource,
    prefetch,
)
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import RunError

# At the end of a run: the longest wait for the prefetcher, which makes no more requests then.
_LEAVE_S = 5.0


class AsyncSource(RolloutSource):
    """The source of one process in asynchronous mode.

    samples_of: the samples of a batch, by its number. The seeds of batch k are those of step k.
    total_steps: of the run; it has as many batches. log_rollouts: takes the answers of each
    channel-B step (MET-03). buffer: an empty one.
    """

    asynchronous = True
    _policy: Policy

    def __init__(
        self,
        config: Config,
        policy: Policy,
        channel_b: ChannelB,
        samples_of: Callable[[int], Sequence[Sample]],
        total_steps: int,
        peers: Peers = SINGLE_PROCESS,
        log_rollouts: LogRollouts | None = None,
        buffer: RolloutBuffer | None = None,
    ) -> None:
        super().__init__(config, policy, channel_b, peers.rank, log_rollouts)
        self._settings = settings = config.rollout_matching.async_rollout
        self._samples_of = samples_of
        self._peers = peers
        self._buffer = buffer or RolloutBuffer(settings, total_steps)
        self._prefetcher: Future[None] | None = None
        self._push_wanted = False
        self._ready_packs = 0
        self._lag: int | None = None

    def begin(self, step: int, clock: PhaseClock) -> None:
        """Push the weights before step `step` if a push is due, in all processes at once.

        Raises:
            RunError: a prefetcher has failed, or the processes are not at the same version.
        """
        if self._prefetcher is None:
            self._buffer.start(step)
            self._prefetcher = in_thread(self._prefetch, "prefetcher")
        prefetcher = self._prefetcher

        def boundary() -> tuple[int, bool]:
            """Return the version of this process, and whether it needs a push."""
            if prefetcher.done():
                prefetcher.result()
            due = self._policy.is_behind(self._settings.sync_every_steps)
            return self._policy.version, due or self._push_wanted

        versions, wants_push = zip(*self._peers.all_gather(boundary), strict=True)
        if len(set(versions)) > 1:
            found = f"before step {step + 1} the processes are at the versions {list(versions)}"
            raise RunError(found)
        if any(wants_push):
            with clock.phase("push"), self.exclusive_access():
                self._policy.push()
        self._ready_packs = self._buffer.packs

    def _prefetch(self) -> None:
        """Fill the buffer until it is closed. Runs in a thread."""
        with suppress(BufferClosed):
            while True:
                self._buffer.put(self.make(self._buffer.begin()))

    def make(self, batch: int) -> ReadyBatch:
        """Request a batch round by round. Weights can be pushed between two rounds.

        The servers answer a round while the round before is assessed.
        """
        feed, samples = self._begin_batch(batch, self._samples_of(batch), PhaseClock())
        with self._channel_b.ahead(samples), prefetch(self._rounds(feed, samples)) as answered:
            packs = [pack for chunk in feed.make(answered) for pack in chunk.packs]
        packs += feed.packer.chunk([], last=True, version=feed.version)
        return ReadyBatch(batch, feed.oldest, packs, feed)

    def _rounds(self, feed: PackFeed, samples: Sequence[Sample]) -> Generator[Answered, None, None]:
        """Yield the answers of each round, of whole groups."""
        group = self._channel_b.answers_per_sample
        size = max(1, (self._policy.backend.round_size or len(samples)) // group) * group
        for start in range(0, len(samples), size):
            part = samples[start : start + size]
            with feed.clock.phase("rollout"):
                version, rollouts = self._answered(part, self._seed_of(feed, start))
            yield Answered(part, rollouts, version, last=False)

    def _answered(self, samples: Sequence[Sample], seed: int) -> tuple[int, list[RolloutOutput]]:
        """Return the answers and their version. If a push is needed first, request again after it.

        Raises RunError if other weights generated a part of the answers.
        """
        while True:
            with self._buffer.requesting():
                version = self._policy.version
                try:
                    rollouts = self._policy.answer_by_pushed(samples, seed)
                except PushNeeded:
                    self._buffer.pause(wait=False)
                    self._push_wanted = True
                    continue
            versions = {version for rollout in rollouts for version in rollout.weights_version}
            if versions - {version}:
                raise RunError(
                    f"answers of weights {version} were expected, and {sorted(versions)} answered"
                )
            return version, rollouts

    def ready(self, step: int) -> bool:
        """Return whether a batch is ready that is not stale."""
        return self._buffer.has_ready()

    def samples(self, step: int, own: Sequence[Sample]) -> Sequence[Sample]:
        return self._samples_of(self._buffer.take_unanswered(step))

    @contextmanager
    def feed(self, step: int, own: Sequence[Sample], clock: PhaseClock) -> Iterator[PackFeed]:
        with clock.phase("rollout"), clock.phase("target"), clock.phase("pack"):  # made already
            made = self._buffer.take(step)
        self._log_answers(step, made.feed)
        self._lag = self._policy.version - made.version
        made.feed.chunks = iter([Chunk(made.packs, last=True)])
        yield made.feed

    def payload(self) -> Payload:
        payload = self._buffer.payload()
        payload.add({"stage2_ab/async/ready_packs": self._ready_packs})
        if self._lag is not None:  # the step was of channel B
            payload.note({"stage2_ab/async/version_lag": self._lag})
            self._lag = None
        return payload

    @contextmanager
    def exclusive_access(self) -> Iterator[None]:
        """Let no process request answers in the block. All processes enter it together.

        An error in the block ends the run.
        """
        self._peers.all_gather(self._buffer.pause)
        yield
        self._buffer.refresh(self._policy.version)
        self._push_wanted = False
        self._buffer.resume()

    def state(self) -> dict[str, Any]:
        """Return the batches that are left, as JSON. Answers are not saved."""
        return self._buffer.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._buffer.restore(state)

    def close(self) -> None:
        self._buffer.close()
        self._policy.close()
        if self._prefetcher is not None:
            wait([self._prefetcher], _LEAVE_S)
