"""Channel B's packs from answers that were asked for beside training (ASYNC-01).

    every step    begin()    an error of the prefetcher ends the run; a push, if one is due
    channel B     ready(), feed()    the oldest share that is ready
    channel A     samples()          the next share without answers

    prefetcher    Stock.begin -> ShareMaker -> Stock.put, while the Gate is open

What a step trains on is not what the Trainer's loader hands it, but as much: over a run every
share of its order is trained on once, whatever the timing. Shares of the last steps that were
answered too late are left to channel A.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from learner.async_rollout.gate import Gate
from learner.async_rollout.prefetcher import MadeShare, Prefetcher, ShareMaker
from learner.async_rollout.queue import ReadyQueue
from learner.async_rollout.shares import Shares
from learner.async_rollout.stock import Stock
from learner.channels.b import ChannelB
from learner.config.rollout_matching import AsyncRolloutConfig
from learner.config.schema import Config
from learner.data.order import ShareOrder
from learner.in_step import LogRollouts
from learner.metrics import Payload, PhaseClock
from learner.model.packed_forward import Pack
from learner.packer import Packer
from learner.packing import Chunk
from learner.peers import ALONE, Peers
from learner.rollout.policy import Policy
from learner.types import Sample
from shared_contracts.errors import RunError

# So long the end of a run waits for the prefetcher, once it can ask nobody any more.
_LEAVE_S = 5.0


def async_source(
    config: Config,
    policy: Policy,
    channel_b: ChannelB,
    train: Sequence[Sample],
    order: ShareOrder,
    peers: Peers,
    log_rollouts: LogRollouts | None = None,
) -> "AsyncSource":
    """The source of a run as `config` describes it. order: of the samples `train`."""
    training = config.training
    return AsyncSource(
        config.rollout_matching.async_rollout,
        policy,
        channel_b,
        Packer(training, config.global_max_length),
        lambda share: [train[index] for index in order.share(share, peers.rank)],
        training.total_steps(len(train)),
        training.seed,
        peers,
        log_rollouts,
    )


class AsyncSource:
    """The source of asynchronous mode, of one process.

    samples_of: a share's, by number. total_steps: of the run, which is as many shares.
    seed: `training.seed`. log_rollouts: takes the answers of each channel-B step (MET-03).
    queue: empty.
    """

    beside = True

    def __init__(
        self,
        settings: AsyncRolloutConfig,
        policy: Policy,
        channel_b: ChannelB,
        packer: Packer,
        samples_of: Callable[[int], Sequence[Sample]],
        total_steps: int,
        seed: int,
        peers: Peers = ALONE,
        log_rollouts: LogRollouts | None = None,
        queue: ReadyQueue[MadeShare] | None = None,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._samples_of = samples_of
        self._total = total_steps
        self._peers = peers
        self._log_rollouts = log_rollouts
        if queue is None:
            queue = ReadyQueue(settings.queue_limit, settings.version_window)
        self._queue = queue
        self._gate = Gate()
        self._maker = ShareMaker(
            policy, channel_b, packer, samples_of, seed, peers.rank, self._gate
        )
        self._shares: Shares | None = None
        self._started: tuple[Stock[MadeShare], Prefetcher] | None = None
        self._ready_packs = 0

    def begin(self, step: int, clock: PhaseClock) -> None:
        """The boundary before step `step`, the same in every process.

        Raises:
            RunError: a prefetcher has failed, or the processes are not at the same version.
        """
        if self._started is None:
            self._started = self._start(self._shares or Shares(step, self._total))
        said = self._peers.share(self._boundary)
        versions = {version for version, _ in said}
        if len(versions) > 1:
            by_rank = [version for version, _ in said]
            raise RunError(f"before step {step + 1} the processes are at the versions {by_rank}")
        if any(wants_push for _, wants_push in said):
            with clock.phase("push"), self.quiet():
                self._policy.push()
        self._ready_packs = self._stock.packs

    def ready(self, step: int) -> bool:
        """Whether there is a share that is fresh enough."""
        self._stock.refresh(self._policy.version)
        return self._stock.has_ready()

    def samples(self, step: int, own: Sequence[Sample]) -> Sequence[Sample]:
        return self._samples_of(self._stock.take_unanswered(step))

    def feed(self, step: int, own: Sequence[Sample], clock: PhaseClock) -> "ShareFeed":
        with clock.phase("rollout"), clock.phase("target"), clock.phase("pack"):  # made beside
            made = self._stock.take(step)
        if self._log_rollouts is not None:
            self._log_rollouts(step + 1, made.judged, made.places)
        return ShareFeed(made, self._policy.version)

    def payload(self) -> Payload:
        payload = self._stock.payload()
        payload.add({"stage2_ab/async/ready_packs": self._ready_packs})
        return payload

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Within, no process asks, and the newest weights are pushed; all enter it together.

        What fails within ends the run.
        """
        self._peers.share(self._gate.close)
        yield
        if self._started is not None:
            self._stock.refresh(self._policy.version)
        self._gate.open()

    def state(self) -> dict[str, Any]:
        """JSON: what a run that goes on from here has to train on; answers are asked for anew."""
        return self._stock.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`, before the first step."""
        self._shares = Shares.restored(state, self._total)

    def close(self) -> None:
        """Ask no more; what is being asked is given up."""
        self._gate.shut()
        if self._started is not None:
            self._stock.close()
        self._policy.close()
        if self._started is not None:
            self._started[1].join(_LEAVE_S)

    def _start(self, shares: Shares) -> tuple[Stock[MadeShare], Prefetcher]:
        stock = Stock(shares, self._queue, self._settings.prefetch_target_packs)
        prefetcher = Prefetcher(stock, self._maker.make)
        prefetcher.start()
        return stock, prefetcher

    @property
    def _stock(self) -> Stock[MadeShare]:
        assert self._started is not None, "begin comes first"
        return self._started[0]

    def _boundary(self) -> tuple[int, bool]:
        """What this process tells the others: its version, and whether it needs a push."""
        assert self._started is not None
        if (error := self._started[1].error) is not None:
            raise error
        due = self._policy.is_behind(self._settings.sync_every_steps)
        return self._policy.version, due or self._gate.push_wanted


class ShareFeed:
    """The packs of one share, which are all there. newest: version of weights."""

    overlaps = False

    def __init__(self, made: MadeShare, newest: int) -> None:
        self._made = made
        self._newest = newest

    def chunks(self) -> Iterator[Chunk[Pack]]:
        yield Chunk(self._made.packs, last=True)

    def payload(self) -> Payload:
        payload = self._made.payload
        payload.note(
            {
                "sync/weights_version": self._made.parts[-1].version,
                "stage2_ab/async/version_lag": self._newest - self._made.version,
            }
        )
        return payload
