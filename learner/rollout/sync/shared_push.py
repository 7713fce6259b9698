"""A push to a colocated server by all learner processes at the same time (ROLL-03).

    process 0   init_communicator      every process   joins with its workers
                start_weight_update
                update_weights                         sends to the workers on its own GPU
                finish_weight_update

Every process makes the same calls of `peers`; a failure in one of them is raised in all.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from learner.distributed.peers import Peers, broadcast_from_rank0
from learner.rollout.parallel_calls import in_thread
from learner.rollout.sync.group import Sender, join_group
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import MergedWeights
from shared_contracts.errors import RunError
from shared_contracts.weights import DtypeName, InitCommunicator, SyncReport, Transport


class SharedPush:
    """One for each process. pusher: of process 0, else None."""

    def __init__(
        self,
        peers: Peers,
        pusher: WeightPusher | None,
        weights: MergedWeights,
        transport: Transport,
    ) -> None:
        self._peers = peers
        self._pusher = pusher
        self._weights = weights
        self._transport = transport
        self._group: Sender | None = None  # of other processes than process 0

    def push(self, version: int, dtype: DtypeName) -> SyncReport:
        """Make `version` the weights of the server, in its type. Every process calls it."""
        began = time.monotonic()
        self._form_groups()
        parameters = self._weights.metadata(dtype)
        self._by_pusher(lambda pusher: pusher.start_weight_update(version, parameters))
        sent = _Sent(self._weights.stream(dtype))

        def transfer() -> None:
            try:
                if self._pusher is not None:
                    self._pusher.update_weights(parameters, sent)
                else:
                    assert self._group is not None
                    with _named(self._peers.rank):
                        self._group.send(parameters, sent)
            except Exception:
                for _ in sent:  # the other processes may wait for this one to gather
                    pass
                raise

        self._peers.all_gather(transfer)
        finished = self._by_pusher(
            lambda pusher: pusher.finish_weight_update().model_dump(mode="json")
        )
        report = SyncReport.model_validate(finished)
        report.seconds["total"] = time.monotonic() - began
        return report

    def close(self) -> None:
        """Leave the group; process 0 leaves with its pusher."""
        if self._group is not None:
            self._group.abandon()

    def _by_pusher(self, work: Callable[[WeightPusher], object]) -> object:
        """Return what `work` returns in process 0, which has the pusher."""

        def run() -> object:
            assert self._pusher is not None
            return work(self._pusher)

        return broadcast_from_rank0(self._peers, run)

    def _form_groups(self) -> None:
        """Form the groups anew, unless all processes are in theirs."""
        peers, given_up = self._peers, threading.Event()

        def needed(pusher: WeightPusher) -> object:
            if pusher.senders == peers.count:
                return None
            return pusher.new_group(peers.count, self._transport).model_dump(mode="json")

        if (body := self._by_pusher(needed)) is None:
            return
        init = InitCommunicator.model_validate(body)
        self.close()
        joining = None
        if self._pusher is None:
            joining = in_thread(partial(join_group, init, given_up, peers.rank))
        try:
            self._by_pusher(lambda pusher: pusher.init_communicator(init))
        except BaseException:  # the server will never open the group
            given_up.set()
            raise

        def joined() -> None:
            if joining is not None:
                with _named(peers.rank):
                    self._group = joining.result()

        peers.all_gather(joined)


class _Sent:
    """One pass of weights. A broken push is taken to its end by another thread."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self._taking = threading.Lock()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        with self._taking:
            return next(self._weights)


@contextmanager
def _named(rank: int) -> Iterator[None]:
    """Raise what breaks in the group of a process as a RunError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise RunError(f"weight sync failed at learner process {rank}: {error}") from error
