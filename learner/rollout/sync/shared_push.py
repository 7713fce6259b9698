"""A push to a colocated server by all learner processes at the same time (ROLL-03).

    process 0   POST /init_communicator/   every process   joins with its workers
                POST /start_weight_update/
                POST /update_weights/                      sends to the workers on its own GPU
                POST /finish_weight_update/

Every process makes the same calls of `peers`; a failure in one of them is raised in all.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from learner.distributed.peers import Peers, broadcast_from_rank0
from learner.rollout.parallel_calls import Calls
from learner.rollout.sync.group import CurrentGpu, Group, join_group
from learner.rollout.sync.push import Sent, WeightPusher
from learner.rollout.sync.weights import WeightSource
from shared_contracts.errors import RunError
from shared_contracts.weights import DtypeName, InitCommunicator, SyncReport, Transport

Join = Callable[[InitCommunicator, threading.Event, int], Group]


class SharedPush:
    """One for each process. pusher: of process 0, else None.

    weights: this process has them whole, or all processes gather them at the same time.
    """

    def __init__(
        self,
        peers: Peers,
        pusher: WeightPusher | None,
        weights: WeightSource,
        transport: Transport,
        join: Join = join_group,
    ) -> None:
        self._peers = peers
        self._pusher = pusher
        self._weights = weights
        self._transport = transport
        self._join = join
        self._group: Group | None = None  # of other processes than process 0

    def push(self, version: int, dtype: DtypeName) -> SyncReport:
        """Make `version` the weights of the server, in its type. Every process calls it."""
        peers, pusher, began = self._peers, self._pusher, time.monotonic()
        self._form_groups()
        parameters = self._weights.metadata(dtype)

        def start() -> None:
            assert pusher is not None
            pusher.start(version, parameters)

        broadcast_from_rank0(peers, start)
        sent = Sent(self._weights.tensors(dtype))

        def transfer() -> None:
            try:
                if pusher is not None:
                    pusher.transfer(parameters, sent)
                else:
                    assert self._group is not None
                    with _named(peers.rank):
                        self._group.send(parameters, sent)
            except Exception:
                for _ in sent:  # the other processes may wait for this one to gather
                    pass
                raise

        peers.all_gather(transfer)

        def finish() -> object:
            assert pusher is not None
            return pusher.finish(parameters).model_dump(mode="json")

        report = SyncReport.model_validate(broadcast_from_rank0(peers, finish))
        report.seconds["total"] = time.monotonic() - began
        return report

    def close(self) -> None:
        """Leave the group; process 0 leaves with its pusher."""
        if self._group is not None:
            self._group.abandon()

    def _form_groups(self) -> None:
        """Form the groups anew, unless all processes are in theirs."""
        peers, pusher = self._peers, self._pusher

        def needed() -> object:
            assert pusher is not None
            if pusher.senders == peers.count:
                return None
            return pusher.new_group(peers.count, self._transport).model_dump(mode="json")

        body = broadcast_from_rank0(peers, needed)
        if body is None:
            return
        init = InitCommunicator.model_validate(body)
        self.close()
        joining, given_up = Calls[None, Group](), threading.Event()
        if pusher is None:
            join = partial(self._join, init, given_up, peers.rank)
            joining.start(None, CurrentGpu().used_by(join))

        def form() -> None:
            assert pusher is not None
            pusher.form_group(init)

        try:
            broadcast_from_rank0(peers, form)
        except BaseException:  # the server will never open the group
            given_up.set()
            raise

        def joined() -> None:
            if pusher is None:
                with _named(peers.rank):
                    self._group = joining.take()[1].result()

        peers.all_gather(joined)


@contextmanager
def _named(rank: int) -> Iterator[None]:
    """Raise what breaks in the group of a process as a RunError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise RunError(f"weight sync failed at learner process {rank}: {error}") from error
