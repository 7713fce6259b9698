"""Asynchronous rollouts: channel B's packs from answers requested beside training (ASYNC-01).

    prefetcher    RolloutBuffer.begin() -> AsyncSource.make() -> RolloutBuffer.put()
                  batch -> Sample -> RolloutOutput -> Segment -> Pack, by one version of the weights
    every step    begin()            an error of the prefetcher ends the run; a push, if one is due
    channel B     ready(), feed()    the oldest batch that is ready
    channel A     samples()          the next batch without answers

A step does not use the samples of the Trainer's loader, but as many of its own: each batch of the
run is trained on once, with any timing (STEP-02). In the last steps channel A trains on the batches
whose answers are late.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from learner.config.rollout_matching import AsyncRolloutConfig
from learner.config.schema import Config
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.models.packs import Pack
from learner.rollout.backend import PushNeeded
from learner.rollout.parallel_calls import in_thread
from learner.rollout.policy import Policy
from learner.runs.metrics import Payload, PhaseClock
from learner.stages.packing import Chunk
from learner.training.channels import ChannelB
from learner.training.synchronous_rollouts import (
    Answered,
    LogRollouts,
    PackFeed,
    RolloutSource,
    prefetch,
)
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import ContractError, RunError

# At the end of a run: the longest wait for the prefetcher, which makes no more requests then.
_LEAVE_S = 5.0


@dataclass(frozen=True)
class ReadyBatch:
    """Batch `batch`, made. version: the oldest that answered. feed: the `PackFeed` of its packs."""

    batch: int
    version: int
    packs: Sequence[Pack]
    feed: PackFeed

    @property
    def size(self) -> int:
        """In packs; at least 1, also if no answer could be used."""
        return max(1, len(self.packs))


class BufferClosed(Exception):
    """No more answers may be requested."""


class RolloutBuffer:
    """The batches of a run, between the thread of a prefetcher and that of a learner.

    A batch has the samples of one process for one step. It is made, taken, dropped and counted as a
    whole, and trained on exactly once:

        unclaimed -> being made or ready -> trained on
            ^                  |
            +--- given back ---+

    At most `queue_limit` packs are ready: a new batch replaces the oldest ones. A batch is stale if
    its weights are more than `version_window` versions older than the newest. No batch is begun
    while `prefetch_target_packs` are ready, or while a batch as large as the largest so far would
    replace another one. A new buffer is paused. total: batches of the run.
    """

    def __init__(self, settings: AsyncRolloutConfig, total: int) -> None:
        self._limit = settings.queue_limit
        self._window = settings.version_window
        self._target = settings.prefetch_target_packs
        self._total = total
        self._changed = threading.Condition()
        self._ready: deque[ReadyBatch] = deque()
        self._newest = 0
        self._largest = 1
        # The first batch that was never begun (None until `start`), those given back, and the one
        # that is being made.
        self._next: int | None = None
        self._returned: list[int] = []
        self._making: int | None = None
        # Packs that were dropped since the last call of `payload`.
        self._dropped = dict.fromkeys(("dropped_oldest", "dropped_stale"), 0)
        self._paused = True
        self._requesting = False
        self._closed = False
        self._idle_s = 0.0
        self._idle_since: float | None = None

    def start(self, first: int) -> None:
        """Begin with batch `first`, or with the restored state."""
        with self._changing():
            self._next = first if self._next is None else self._next

    def state(self) -> dict[str, Any]:
        """Return as JSON the batches that are left: all from `next` on, and those in `left`."""
        with self._changed:
            making = [] if self._making is None else [self._making]
            held = [ready.batch for ready in self._ready]
            return {"next": self._next, "left": sorted([*self._returned, *held, *making])}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; call it before `start`."""
        with self._changing():
            self._next, self._returned = state["next"], sorted(state["left"])

    # --- the prefetcher

    def begin(self) -> int:
        """Wait until a batch is needed, and return its number. Raises BufferClosed."""
        with self._changed:
            self._idle_since = time.perf_counter()
            while not self._closed:
                packs = self.packs
                room = packs + self._largest <= self._limit
                if packs < self._target and room and (batch := self._claim()) is not None:
                    self._count_idle()
                    self._idle_since = None
                    self._making = batch
                    return batch
                self._changed.wait()
            raise BufferClosed

    @contextmanager
    def requesting(self) -> Iterator[None]:
        """Wait while requests are paused; they stay unpaused in the block. Raises BufferClosed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._paused)
            if self._closed:
                raise BufferClosed
            self._requesting = True
        try:
            yield
        finally:
            with self._changing():
                self._requesting = False

    def put(self, ready: ReadyBatch) -> None:
        """Store a batch that was begun, unless the learner has taken it meanwhile.

        Raises ContractError if the batch does not fit into an empty queue.
        """
        with self._changing():
            if self._making != ready.batch:
                return
            if ready.size > self._limit:
                raise ContractError(
                    "rollout_matching.async_rollout.queue_limit",
                    f"{self._limit}, and the {ready.size} packs of batch {ready.batch}, which "
                    f"one step of a process trains on, do not fit ({self})",
                    f"Raise it to at least {ready.size}, or lower training.effective_batch_size",
                )
            self._making = None
            self._largest = max(self._largest, ready.size)
            if self._is_stale(ready):
                self._drop(ready, "dropped_stale")
                return
            while self.packs + ready.size > self._limit:
                self._drop(self._ready.popleft(), "dropped_oldest")
            self._ready.append(ready)

    # --- the learner

    def pause(self, *, wait: bool = True) -> None:
        """Start no request. wait: for the running one; False within `requesting`."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not (wait and self._requesting))

    def resume(self) -> None:
        with self._changing():
            self._paused = False

    def close(self) -> None:
        """Begin no more batches and requests. A running request is not waited for."""
        with self._changing():
            self._closed = True

    def refresh(self, version: int) -> None:
        """Note that `version` is the newest, and give stale batches back."""
        with self._changing():
            self._newest = version
            for ready in [ready for ready in self._ready if self._is_stale(ready)]:
                self._ready.remove(ready)
                self._drop(ready, "dropped_stale")

    @property
    def packs(self) -> int:
        with self._changed:
            return sum(ready.size for ready in self._ready)

    def take(self, step: int) -> ReadyBatch:
        """Return the oldest batch, for channel B in step `step`.

        Raises RunError if there is none: call `refresh` and `packs` first.
        """
        with self._changing():
            if not self._ready:
                found = f"channel B was to run step {step + 1}, and no batch is ready"
                raise RunError(f"{found}: {self}")
            return self._ready.popleft()

    def take_unanswered(self, step: int) -> int:
        """Return a batch without answers, for channel A in step `step`.

        At the end of a run there may be none; then it is a batch whose answers are not used.
        """
        with self._changing():
            batch = self._claim()
            if batch is None and self._ready:
                batch = self._ready.pop().batch
            if batch is None:
                batch, self._making = self._making, None
            if batch is None:
                raise RunError(f"no batch is left for step {step + 1}: {self}")
            return batch

    def payload(self) -> Payload:
        with self._changed:
            self._count_idle()
            payload = Payload()
            payload.add({f"stage2_ab/async/{why}": n for why, n in self._dropped.items()})
            payload.note({"stage2_ab/async/prefetch_idle_s": self._idle_s})
            self._dropped = dict.fromkeys(self._dropped, 0)
            self._idle_s = 0.0
            return payload

    def _count_idle(self) -> None:
        if self._idle_since is not None:
            now = time.perf_counter()
            self._idle_s += now - self._idle_since
            self._idle_since = now

    # --- the state of each batch

    def _claim(self) -> int | None:
        """Return the next batch that is not begun; None if none is left."""
        assert self._next is not None, "start comes first"
        if self._returned:
            return self._returned.pop(0)
        if self._next >= self._total:
            return None
        self._next += 1
        return self._next - 1

    def _drop(self, ready: ReadyBatch, why: str) -> None:
        self._returned = sorted([*self._returned, ready.batch])
        self._dropped[why] += ready.size

    def _is_stale(self, ready: ReadyBatch) -> bool:
        return ready.version < self._newest - self._window

    def __str__(self) -> str:
        held = ", ".join(
            f"batch {ready.batch} of version {ready.version} in {ready.size} packs"
            for ready in self._ready
        )
        return (
            f"the queue holds {held or 'nothing'}; newest version {self._newest}, "
            f"version_window {self._window}, queue_limit {self._limit}"
        )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Notify all waiting threads after the block."""
        with self._changed:
            yield
            self._changed.notify_all()


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

        Raises RunError if a prefetcher has failed, or the processes are not at the same version.
        """
        if self._prefetcher is None:
            self._buffer.start(step)
            self._prefetcher = in_thread(self._prefetch, "prefetcher")
        prefetcher = self._prefetcher

        def boundary() -> tuple[int, bool]:
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
        return self._buffer.packs > 0

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
