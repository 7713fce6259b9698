"""The `server` backend: rollouts from servers reached by URL.

push_weights         process 0 pushes to every available server; at least one must take the push
rollout, stream      reconnect lost servers -> Dispatch over the usable ones
repush_restarted     process 0, while it waits for others: pushes again to restarted servers

All learner processes call the servers. Process 0 alone pushes, and the others adopt its report of
every server (SYNC-08).
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import TypeVar

from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.rollout.answers import output_of
from learner.rollout.backend import Journal, PushNeeded, RolloutBackend, WeightChannel
from learner.rollout.client import RolloutClient
from learner.rollout.clock import CLOCK, Clock
from learner.rollout.dispatch import Dispatch, ServerPool
from learner.rollout.distribution import part_size, rank_chunk_size
from learner.rollout.parallel_calls import in_parallel
from learner.rollout.server_handle import Differences, ServerHandle
from learner.rollout.sync.probe import ProofOfEffect, probe_call
from learner.rollout.sync.shared_push import SharedPush
from learner.types import RolloutOutput
from shared_contracts.errors import ContractError, RunError
from shared_contracts.infer import RequestConfig, RolloutEnvelope, RolloutInferRequest
from shared_contracts.weights import MOST_VERSION_STEP, DtypeName

T = TypeVar("T")
# Of each server that was asked for a proof: its URL, the dtype of its weights, envelopes as JSON.
Answers = list[tuple[str, DtypeName, list[str]]]

# `repush_restarted` takes at most one part in so many of the time: checking a server that is cut
# off takes seconds.
_CHECKED_FRACTION = 6


class ServerBackend(RolloutBackend):
    """A backend that spreads rollouts over servers and keeps their order and seeds.

    After a push every answer must be of these weights. A lost server is left out. It is checked
    before every push and rollout, less and less often if it cannot take pushes. If no server is
    usable, the backend waits for one (`ServerPool.wait_for`).

    clients: one per server, in the order of `servers[]`.
    channels: one per server in process 0, and none in the others.
    decode_batch_size: most sequences decoded at once per rollout GPU (DIST-03).
    journal: gets notes of every call and push.
    differences: checked before a lost server is used again.
    peers: the learner processes, each with a backend over the same servers.
    gather: called in each process before a push if the weights are sharded; with the dtype of the
        servers' weights.
    shared: pushes to the one server by all processes; after a failure process 0 pushes alone.
    proof: decides which pushes are proven, and how; None: none is.
    clock: of pauses and waits.
    """

    streams = True

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        channels: Sequence[WeightChannel],
        decode_batch_size: int,
        journal: Journal | None = None,
        differences: Differences | None = None,
        peers: Peers = SINGLE_PROCESS,
        gather: Callable[[DtypeName], None] | None = None,
        proof: ProofOfEffect | None = None,
        shared: SharedPush | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        super().__init__(journal)
        self._dtype: DtypeName = "float32"
        self._gather = gather
        self._proof = proof
        self._shared = shared
        self._peers = peers
        self._is_leader = peers.rank == 0
        own = channels if self._is_leader else [None] * len(clients)
        self._servers = [
            ServerHandle(client, self.journal, channel, differences, clock)
            for client, channel in zip(clients, own, strict=True)
        ]
        timeout_s = max(client.timeout_s for client in clients)
        self._pool = ServerPool(
            self._servers, decode_batch_size, timeout_s, self.journal, peers, clock
        )
        self._clock = clock
        self._dispatches: set[Dispatch] = set()
        self._pushing = threading.Lock()  # one thread at a time pushes
        self._no_check_until = 0.0

    @property
    def round_size(self) -> int:
        """The most requests of this process at once (DIST-04)."""
        sizes = [server.world_size for server in self._servers]
        return rank_chunk_size(self._pool.decode_batch_size, sizes, self._peers.count)

    def close(self) -> None:
        """Give up running requests of all threads, and leave the servers."""
        for dispatch in tuple(self._dispatches):
            dispatch.give_up()
        if self._shared is not None:
            self._shared.close()
        for server in self._servers:
            server.close()

    # --- pushes

    def connect(self) -> int:
        """Form the weight group with every server; return their newest weights version.

        Every process calls it. Raises ContractError if the versions of the servers are too far
        apart for a common next push.
        """
        self.version.newest, self._dtype = self._by_leader(self._connect)
        return self.version.newest

    def _connect(self) -> tuple[int, DtypeName]:
        """Return the newest version of the servers, and the dtype of their weights.

        Servers of several dtypes get weights that are gathered in float32, and cast for each.
        """
        versions = in_parallel([server.connect for server in self._servers])
        newest, oldest = max(versions), min(versions)
        if newest - oldest > MOST_VERSION_STEP:  # the others would refuse the next push
            raise ContractError(
                f"POST {self._servers[versions.index(newest)].url}/init_communicator/",
                f"weights_version is {newest}, and another server of the run has {oldest}",
                "Restart that server, or remove it from rollout_matching.vllm.server.servers",
            )
        dtypes = {server.dtype for server in self._servers}
        return newest, dtypes.pop() if len(dtypes) == 1 else "float32"

    def push_weights(self, version: int) -> None:
        """Push to all servers at the same time; one that fails is lost.

        Every process calls it, and none returns before all of them have its outcome. If all
        servers fail, process 0 waits for them and pushes once more.

        Raises:
            RunError: no server took the push, or one computes with other weights; in every process.
        """
        self.prove(self.push_and_ask(version))

    def push_and_ask(self, version: int) -> Answers:
        """Push as `push_weights`; return the answers for `prove`, of each usable server if due.

        Process 0 asks. A server that was pushed to again meanwhile makes the next proof due.
        """
        self._peers.all_gather(lambda: None)  # every process has its answers of the old weights
        if not self._push_shared(version):
            if self._gather is not None:
                self._gather(self._dtype)
            self.version.record(self._by_leader(partial(self._push, version)))

        def ask() -> Answers:
            call, servers = probe_call(version), self._pool.usable()
            unproven = any(server.unproven for server in servers)
            if self._proof is None or not self._proof.is_due(unproven):
                return []
            for server in self._servers:
                server.unproven = True
            answers = in_parallel([partial(server.ask, call) for server in servers])
            return [
                (server.url, server.dtype, [envelope.model_dump_json() for envelope in envelopes])
                for server, envelopes in zip(servers, answers, strict=True)
                if envelopes
            ]

        began = self._clock()
        answers = broadcast_from_rank0(self._peers, ask)
        if answers:
            self.journal.probe(self._clock() - began)
        return answers

    def prove(self, answers: Answers) -> None:
        """Compare answers with the forward of the trainer's model, in every process.

        A sharded model computes in all of them. Raises WeightsDiffer.
        """
        if not answers:
            return
        began = self._clock()
        for url, dtype, texts in answers:
            assert self._proof is not None
            envelopes = [RolloutEnvelope.model_validate_json(text) for text in texts]
            self._proof.check(url, envelopes, dtype)
        self.journal.probe(self._clock() - began)
        self._peers.all_gather(lambda: None)

    def _push_shared(self, version: int) -> bool:
        """Push by all processes; return whether that was possible."""
        if self._shared is None:
            return False
        if broadcast_from_rank0(self._peers, lambda: bool(self._pool.lost())):
            return False
        (server,) = self._servers
        try:
            report = self._shared.push(version, self._dtype)
        except RunError as error:
            if self._is_leader:
                server.lose(str(error))
            return False
        self._by_leader(partial(server.adopt_push, report))
        self.version.record(version)
        return True

    def _push(self, version: int) -> int:
        def pushable() -> list[ServerHandle]:
            return self._pool.usable() + _checked(self._due())

        with self._pushing:
            for is_last in (False, True):
                servers = self._pool.wait_for(pushable)
                errors = [error for error in _push_to(servers, version) if error is not None]
                if len(errors) < len(servers):
                    break
                if is_last:
                    raise errors[0]
            self.version.record(version)
        return version

    def repush_restarted(self) -> None:
        """Find restarted servers, and push again to those that can take it.

        Called repeatedly while other processes are waited for, and only while the training
        weights are those of the last push. Raises only what would fail again.
        """
        if not self._is_leader or self.version.pushed is None:
            return
        if self._clock() < self._no_check_until or not self._pushing.acquire(blocking=False):
            return
        try:
            began = self._clock()
            due = _checked([*self._pool.usable(), *self._due()])
            ended = self._clock()
            self._no_check_until = ended + _CHECKED_FRACTION * (ended - began)
            _push_to(due, self.version.pushed)
        finally:
            self._pushing.release()

    def _by_leader(self, work: Callable[[], T]) -> T:
        """Return what `work` returns in process 0; the others adopt its reports."""
        found, reports = broadcast_from_rank0(
            self._peers, lambda: (work(), [server.report() for server in self._servers])
        )
        if not self._is_leader:
            for server, report in zip(self._servers, reports, strict=True):
                server.adopt(*report)
        return found

    def _due(self) -> list[ServerHandle]:
        """Return the lost servers; those that rest only if no server is usable."""
        lost = self._pool.lost()
        if len(lost) == len(self._servers):
            return lost
        return [server for server in lost if not server.rests()]

    # --- rollouts

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Return outputs in the order of the requests. Each process sends its own requests.

        Raises:
            RunError: no server is left and none came back in time, or a request was refused.
        """
        chunks = self._chunks(requests, request_config, self._restore_lost, len(requests))
        return list(chain.from_iterable(chunks))

    def stream(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> Generator[list[RolloutOutput], None, None]:
        """Yield the same outputs in parts, in order, while later ones are generated."""
        size = part_size(len(requests), self.round_size)
        return self._chunks(requests, request_config, self._restore_lost, size)

    def rollout_asynchronous(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Do the same as `rollout` while the training weights change: push nothing.

        Raises:
            PushNeeded: no server has the weights, and at least one only lacks them.
        """
        chunks = self._chunks(requests, request_config, self._reconnect_lost, len(requests))
        return list(chain.from_iterable(chunks))

    def _chunks(
        self,
        requests: Sequence[RolloutInferRequest],
        config: RequestConfig,
        reconnect: Callable[[], list[ServerHandle]],
        size: int,
    ) -> Generator[list[RolloutOutput], None, None]:
        """Yield outputs `size` at a time."""
        dispatch = Dispatch(requests, config, self.version.pushed, self._pool, reconnect)
        self._dispatches.add(dispatch)
        try:
            with closing(dispatch.chunks(max(1, size))) as chunks:
                for envelopes in chunks:
                    self.journal.healthy = len(self._pool.usable())
                    yield [output_of(envelope) for envelope in envelopes]
        finally:
            self._dispatches.discard(dispatch)

    def _restore_lost(self) -> list[ServerHandle]:
        """Push to lost servers in process 0 (SYNC-07); in the others check if they are back."""
        with self._pushing:
            if self._is_leader:
                _push_to(_checked(self._due()), self.version.pushed)
            else:
                self._reconnect()
        return self._pool.usable()

    def _reconnect_lost(self) -> list[ServerHandle]:
        """Use lost servers again that have the weights; push nothing."""
        with self._pushing:
            self._reconnect()
        usable = self._pool.usable()
        if not usable and any(server.wants_push for server in self._servers):
            raise PushNeeded(f"no rollout server has the weights ({self._pool.reasons()})")
        return usable

    def _reconnect(self) -> None:
        in_parallel([partial(server.reconnect, self.version.pushed) for server in self._due()])


def _checked(servers: Sequence[ServerHandle]) -> list[ServerHandle]:
    """Check the servers; return those that are lost and can take a push now."""
    pushable = in_parallel([server.check for server in servers])
    return [server for server, can in zip(servers, pushable, strict=True) if can]


def _push_to(servers: Sequence[ServerHandle], version: int | None) -> list[RunError | None]:
    return in_parallel([partial(server.push_to_version, version) for server in servers])
