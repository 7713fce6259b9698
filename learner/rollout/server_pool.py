"""The `server` backend: rollouts from servers reached by URL, and pushes to them.

    push_weights       process 0 pushes to every available server; at least one must take the push
    rollout, stream    reconnect lost servers -> Dispatch over the usable ones
    repush_restarted   process 0, while it waits for others: pushes again to restarted servers

    Dispatch           each request is answered exactly once (DIST-01 to DIST-05)
      chunk -> _split  a part for every usable server
            -> _send   each server gets calls for its parts while it has free places
            -> _take   an answer; or a lost server, whose parts are split among the others
      While a chunk lacks answers, requests of the next CHUNKS_AHEAD chunks fill free places.

All learner processes call the servers. Process 0 alone pushes, and the others adopt its report of
every server (SYNC-08).
"""

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import closing
from functools import partial
from itertools import chain
from typing import TypeVar
from uuid import uuid4

from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.distributed.waiting import waiting_for
from learner.rollout.answers import output_of
from learner.rollout.backend import Journal, PushNeeded, RolloutBackend
from learner.rollout.client import CLOCK, Clock, RolloutClient
from learner.rollout.distribution import (
    CHUNKS_AHEAD,
    cut,
    next_call,
    part_size,
    plan_chunks,
    rank_caps,
    rank_chunk_size,
)
from learner.rollout.parallel_calls import in_parallel, in_thread
from learner.rollout.server import ATTEMPTS, Differences, RequestPart, Server, ServerLost
from learner.rollout.sync.probe import ProofOfEffect, probe_call
from learner.rollout.sync.push import WeightPusher
from learner.types import RolloutOutput
from shared_contracts.errors import RunError
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope, RolloutInferRequest
from shared_contracts.weights import DtypeName

T = TypeVar("T")
# Of each server that was asked for a proof: its URL, the dtype of its weights, envelopes as JSON.
Answers = list[tuple[str, DtypeName, list[str]]]

# `repush_restarted` takes at most one part in so many of the time: checking a server that is cut
# off takes seconds.
_CHECKED_FRACTION = 6
# Longer than any engine takes to be built again.
LONGEST_WAIT_S = 1800.0
# Requests that fail so often, at servers that come back for a time, end the run.
MOST_ATTEMPTS = 4 * ATTEMPTS


class ServerPool(RolloutBackend):
    """A backend that spreads rollouts over servers and keeps their order and seeds.

    After a push every answer must be of these weights. A lost server is left out. It is checked
    before every push and rollout, less and less often if it cannot take pushes. If no server is
    usable, the pool waits for one.

    clients, pushers: one per server, in the order of `servers[]`; only process 0 uses pushers.
    decode_batch_size: most sequences decoded at once per rollout GPU (DIST-03).
    differences: checked before a lost server is used again.
    gather: called in each process before a push if the weights are sharded; with the dtype of the
        servers' weights.
    together: pushes to the one server by all processes; after a failure process 0 pushes alone.
    proof: decides which pushes are proven, and how; None: none is.
    check: raises why no server comes back any more, if that is known.
    least_wait_s: smallest `timeout_s`, the longest wait for servers that do not answer.
    """

    streams = True

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        pushers: Sequence[WeightPusher],
        decode_batch_size: int,
        journal: Journal | None = None,
        differences: Differences | None = None,
        peers: Peers = SINGLE_PROCESS,
        gather: Callable[[DtypeName], None] | None = None,
        proof: ProofOfEffect | None = None,
        together: WeightPusher | None = None,
        clock: Clock = CLOCK,
        check: Callable[[], object] = lambda: None,
        least_wait_s: float = 0.0,
    ) -> None:
        super().__init__(journal)
        self.peers = peers
        self._check = check
        self.clock = clock
        self.timeout_s = max(least_wait_s, *(client.timeout_s for client in clients))
        self._dtype: DtypeName = "float32"
        self._gather = gather
        self._proof = proof
        self._together = together
        self._is_leader = peers.rank == 0
        own = pushers if self._is_leader else [None] * len(clients)
        self.servers = [
            Server(client, self.journal, pusher, differences, clock)
            for client, pusher in zip(clients, own, strict=True)
        ]
        self._decode_batch_size = decode_batch_size
        self._dispatches: set[Dispatch] = set()
        self._pushing = threading.Lock()  # one thread at a time pushes
        self._no_check_until = 0.0
        self._closed = False

    def close(self) -> None:
        """Give up running requests and waits of all threads, and leave the servers."""
        self._closed = True
        for dispatch in tuple(self._dispatches):
            dispatch.given_up.set()
        if self._together is not None:
            self._together.close()
        for server in self.servers:
            server.close()

    # --- servers

    @property
    def round_size(self) -> int:
        """The most requests of this process at once (DIST-04)."""
        sizes = [server.world_size for server in self.servers]
        return rank_chunk_size(self._decode_batch_size, sizes, self.peers.count)

    def usable(self) -> list[Server]:
        return [server for server in self.servers if server.lost is None]

    def reasons(self) -> str:
        return "; ".join(f"{server.url}: {server.lost}" for server in self.servers)

    def caps(self, usable: Sequence[Server]) -> dict[Server, int]:
        """Return the most requests of this process at each of these servers (DIST-03).

        They are its shares of all servers, so they do not depend on what another process has
        lost. A process that has no share at any of them gets one place at each.
        """
        sizes = [server.world_size for server in self.servers]
        caps = rank_caps(self._decode_batch_size, sizes, self.peers.count, self.peers.rank)
        shares = dict(zip(self.servers, caps, strict=True))
        here = {server: shares[server] for server in usable}
        return here if any(here.values()) else dict.fromkeys(here, 1)

    def wait_for(self, find: Callable[[], list[T]]) -> list[T]:
        """Call `find` until it returns something.

        Raises RunError: for `timeout_s` no server was starting or needed only a push, or none came
        back within LONGEST_WAIT_S, or none can, or the pool was closed.
        """
        last_sign_s = 0.0
        with waiting_for("a rollout server to come back", self.reasons):
            for waited_s in self.clock.attempts():
                if found := find():
                    return found
                if self._closed:
                    raise RunError("the rollout servers were left")
                self._check()
                if any(server.problem in ("not-ready", "push-needed") for server in self.servers):
                    last_sign_s = waited_s
                limit_s, name = LONGEST_WAIT_S, "the longest wait"
                if waited_s - last_sign_s > self.timeout_s:
                    limit_s, name = self.timeout_s, "rollout_matching.vllm.server.timeout_s"
                if waited_s > limit_s:
                    break
        raise RunError(
            f"no rollout server can take a push and answer; waited {limit_s:.0f} s ({name}) for "
            f"one to come back or to start. {self.reasons()}"
        )

    def _due(self) -> list[Server]:
        """Return the lost servers; those that rest only if no server is usable."""
        lost = [server for server in self.servers if server.lost is not None]
        if len(lost) == len(self.servers):
            return lost
        return [server for server in lost if not server.rests()]

    # --- pushes

    def connect(self) -> int:
        """Form the weight groups, in every process; return the newest version of the servers."""
        self.version.newest, self._dtype = self._by_leader(self._connect)
        return self.version.newest

    def _connect(self) -> tuple[int, DtypeName]:
        """Return the newest version of the servers, and the dtype of their weights.

        Servers of several dtypes get weights that are gathered in float32, and cast for each.
        """
        newest = max(in_parallel([server.connect for server in self.servers]))
        dtypes = {server.dtype for server in self.servers}
        return newest, dtypes.pop() if len(dtypes) == 1 else "float32"

    def push_weights(self, version: int) -> None:
        """Push to all servers at the same time; one that fails is lost.

        Every process calls it, and none returns before all of them have its outcome. If all
        servers fail, process 0 waits for them and pushes once more. Raises RunError in every
        process if no server took the push, or one computes with other weights.
        """
        self.prove(self.push_and_ask(version))

    def push_and_ask(self, version: int) -> Answers:
        """Push as `push_weights`; return the answers for `prove`, of each usable server if due."""
        self.peers.all_gather(lambda: None)  # every process has its answers of the old weights
        if not self._push_together(version):
            if self._gather is not None:
                self._gather(self._dtype)
            self.version.record(self._by_leader(partial(self._push, version)))
        began = self.clock()
        answers = broadcast_from_rank0(self.peers, partial(self._ask, version))
        if answers:
            self.journal.probe(self.clock() - began)
        return answers

    def _push_together(self, version: int) -> bool:
        if self._together is None:
            return False
        if broadcast_from_rank0(self.peers, lambda: not self.usable()):
            return False
        (server,) = self.servers
        try:
            report = self._together.push_together(version, self._dtype)
        except RunError as error:
            if self._is_leader:
                server.lose(str(error))
            return False
        self._by_leader(partial(server.adopt_push, report))
        self.version.record(version)
        return True

    def _push(self, version: int) -> int:
        def push() -> list[Server | RunError]:
            calls = [partial(server.push, version) for server in self.usable()]
            calls += [partial(server.restore, version, push=True) for server in self._due()]
            errors = [error for error in in_parallel(calls) if error is not None]
            return [*self.usable(), *errors]

        with self._pushing:
            for is_last in (False, True):
                first, *_ = self.wait_for(push)
                if isinstance(first, Server):
                    break
                if is_last:
                    raise first
            self.version.record(version)
        return version

    def _ask(self, version: int) -> Answers:
        """Have every usable server answer the prompts of a proof, if one is due."""
        if self._proof is None or not self._proof.is_due():
            return []
        servers, call = self.usable(), probe_call(version)
        answers = in_parallel([partial(server.ask, call) for server in servers])
        if not any(answers):
            self._proof.missed()
        return [
            (server.url, server.dtype, [envelope.model_dump_json() for envelope in envelopes])
            for server, envelopes in zip(servers, answers, strict=True)
            if envelopes
        ]

    def prove(self, answers: Answers) -> None:
        """Compare answers with the forward of the trainer's model, in every process.

        A sharded model computes in all of them. Raises WeightsDiffer.
        """
        if not answers:
            return
        began = self.clock()
        for url, dtype, texts in answers:
            assert self._proof is not None
            envelopes = [RolloutEnvelope.model_validate_json(text) for text in texts]
            self._proof.check(url, envelopes, dtype)
        self.journal.probe(self.clock() - began)
        self.peers.all_gather(lambda: None)

    def repush_restarted(self) -> None:
        """Find restarted servers, and push again to those that can take it.

        Called repeatedly while other processes are waited for, and only while the training
        weights are those of the last push. Raises only what would fail again.
        """
        if not self._is_leader or self.version.pushed is None:
            return
        if self.clock() < self._no_check_until or not self._pushing.acquire(blocking=False):
            return
        try:
            began = self.clock()
            in_parallel([server.check for server in self.usable()])
            checked_s = self.clock() - began
            self._restore(push=True)
            self._no_check_until = self.clock() + _CHECKED_FRACTION * checked_s
        finally:
            self._pushing.release()

    def _by_leader(self, work: Callable[[], T]) -> T:
        """Return what `work` returns in process 0; the others adopt its reports."""
        found, reports = broadcast_from_rank0(
            self.peers, lambda: (work(), [server.report() for server in self.servers])
        )
        if not self._is_leader:
            for server, report in zip(self.servers, reports, strict=True):
                server.adopt(*report)
        return found

    # --- rollouts

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Return outputs in the order of the requests. Each process sends its own requests.

        Raises RunError if no server came back in time, or a request was refused.
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
        reconnect: Callable[[], list[Server]],
        size: int,
    ) -> Generator[list[RolloutOutput], None, None]:
        dispatch = Dispatch(requests, config, self.version.pushed, self, reconnect)
        self._dispatches.add(dispatch)
        try:
            with closing(dispatch.chunks(max(1, size))) as chunks:
                for envelopes in chunks:
                    self.journal.healthy = len(self.usable())
                    yield [output_of(envelope) for envelope in envelopes]
        finally:
            self._dispatches.discard(dispatch)

    def _restore_lost(self) -> list[Server]:
        """Push to lost servers in process 0 (SYNC-07); in the others check if they are back."""
        with self._pushing:
            self._restore(push=self._is_leader and self.version.pushed is not None)
        return self.usable()

    def _reconnect_lost(self) -> list[Server]:
        with self._pushing:
            self._restore(push=False)
        usable = self.usable()
        if not usable and any(server.problem == "push-needed" for server in self.servers):
            raise PushNeeded(f"no rollout server has the weights ({self.reasons()})")
        return usable

    def _restore(self, *, push: bool) -> None:
        version = self.version.pushed
        in_parallel([partial(server.restore, version, push=push) for server in self._due()])


class Dispatch:
    """One rollout over the servers of a pool: one answer for each request.

    config: request i has `seed + i` (SEED-01). version: of the weights that must answer; None: any.
    reconnect: uses lost servers again that can be used, and returns all usable servers; called
        before every chunk, and repeatedly while no server is usable.

    given_up: set by any thread to end the rollout; `chunks` raises RunError soon.
    """

    def __init__(
        self,
        requests: Sequence[RolloutInferRequest],
        config: RequestConfig,
        version: int | None,
        pool: ServerPool,
        reconnect: Callable[[], list[Server]],
    ) -> None:
        self.given_up = threading.Event()
        self._requests = requests
        self._config = config
        self._version = version
        self._pool = pool
        self._reconnect = reconnect
        self._id = uuid4().hex
        self._envelopes: dict[int, RolloutEnvelope] = {}
        self._queues = {server: list[RequestPart]() for server in pool.servers}
        self._caps: dict[Server, int] = {}
        self._calls: dict[Future[list[RolloutEnvelope]], tuple[Server, RequestPart]] = {}
        self._answered_s = pool.clock()  # the time of the last answer

    def chunks(self, size: int) -> Generator[list[RolloutEnvelope], None, None]:
        """Yield one envelope per request, in order, `size` at a time.

        Between two chunks running calls go on, and none is started. When the generator is closed,
        and after an error, running calls end soon. Raises RunError if no server answers, a request
        was refused, or the rollout was given up.
        """
        chunks = cut(len(self._requests), size)
        later = deque(chunks)
        try:
            for chunk in chunks:
                while later and later[0].start <= chunk.start + CHUNKS_AHEAD * size:
                    self._reconnect()
                    self._split(RequestPart(later.popleft()), owner=None)
                self._send()
                while not self._envelopes.keys() >= set(chunk):
                    self._take()
                    self._send()
                yield [self._envelopes.pop(index) for index in chunk]
        finally:
            self.given_up.set()

    def _split(self, part: RequestPart, owner: Server | None) -> None:
        """Split a part among the usable servers. owner: the server that lost it, if any."""
        if not (usable := self._pool.usable()):
            in_vain_s = self._pool.clock() - self._answered_s
            if part.tried >= MOST_ATTEMPTS and in_vain_s > self._pool.timeout_s:
                raise RunError(
                    f"no rollout server answers, though some come back: {part.tried} attempts in "
                    f"{in_vain_s:.0f} s ({self._pool.reasons()})"
                )
            usable = self._pool.wait_for(self._reconnect)
        caps = self._pool.caps(usable)
        self._caps |= caps
        shares = plan_chunks(len(part.requests), list(caps.values()))
        for server, share in zip(caps, shares, strict=True):
            if requests := part.requests[share.start : share.stop]:
                of_server = RequestPart(requests, part.tried)
                insort(self._queues[server], of_server, key=lambda each: each.requests.start)
                if owner not in (None, server):
                    self._pool.journal.split(server.url, requests)

    def _send(self) -> None:
        """Make calls for the first requests of each queue while the server has free places."""
        for server, queue in self._queues.items():
            while queue and (count := self._next_count(server)):
                part = queue.pop(0)
                if rest := part.requests[count:]:
                    queue.insert(0, RequestPart(rest, part.tried))
                    part = RequestPart(part.requests[:count], part.tried)
                answer = partial(server.answer, self._call(part.requests), part, self.given_up)
                self._calls[in_thread(answer)] = server, part

    def _next_count(self, server: Server) -> int:
        """Return the most requests of the next call to a server; 0 without a free place."""
        most = max(1, self._caps.get(server, 0))
        waiting = sum(len(part.requests) for part in self._queues[server])
        running = [len(part.requests) for each, part in self._calls.values() if each is server]
        free = most - sum(running)
        return next_call(waiting, free, most, self._pool.peers.count, len(running))

    def _call(self, requests: range) -> InferCall:
        """Make a call. The same requests give the same id, so the server recognizes a retry."""
        config = self._config
        if config.seed is not None:
            config = config.model_copy(update={"seed": config.seed + requests.start})
        return InferCall(
            infer_requests=list(self._requests[requests.start : requests.stop]),
            request_config=config,
            request_id=f"{self._id}-{requests.start}-{requests.stop}",
            expected_weights_version=self._version,
        )

    def _take(self) -> None:
        outcome = next(as_completed(self._calls))
        server, part = self._calls.pop(outcome)
        queue = self._queues[server]
        try:
            envelopes = outcome.result()
        except ServerLost as error:
            if self.given_up.is_set():
                raise RunError("the rollout was given up") from error
            queue.insert(0, part)
        else:
            self._envelopes |= zip(part.requests, envelopes, strict=True)
            self._answered_s = self._pool.clock()
        if server.lost is not None:
            left, self._queues[server] = [*queue], []
            for part in left:
                self._split(part, server)
