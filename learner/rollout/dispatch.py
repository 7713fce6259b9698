"""One rollout over several servers; each request is answered exactly once (DIST-01 to DIST-05).

    chunk -> _split   a part for every usable server
          -> _send    each server gets calls for its parts while it has free places
          -> _take    an answer; or a lost server, whose parts are split among the others
          -> chunk    its answers, in order, when all have arrived

While a chunk lacks answers, requests of the next CHUNKS_AHEAD chunks fill free places.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from uuid import uuid4

from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.distributed.waiting import waiting_for
from learner.rollout.backend import Journal
from learner.rollout.clock import CLOCK, Clock
from learner.rollout.distribution import CHUNKS_AHEAD, cut, next_call, plan_chunks, rank_caps
from learner.rollout.parallel_calls import in_thread
from learner.rollout.server_handle import RequestPart, ServerHandle, ServerLost
from shared_contracts.errors import RunError
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope, RolloutInferRequest

T = TypeVar("T")

# Longer than any engine takes to be built again.
LONGEST_WAIT_S = 1800.0
# Between two checks; doubled each time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
# Servers that come back and are lost again without one answer end the run.
FRUITLESS_RETURNS = 3


@dataclass(frozen=True)
class ServerPool:
    """All servers, also lost ones.

    decode_batch_size: most sequences decoded at once per rollout GPU (DIST-03).
    timeout_s: longest wait for servers that do not answer. peers: the learner processes.
    clock: of the waits.
    """

    servers: Sequence[ServerHandle]
    decode_batch_size: int
    timeout_s: float
    journal: Journal
    peers: Peers = SINGLE_PROCESS
    clock: Clock = CLOCK

    def usable(self) -> list[ServerHandle]:
        return [server for server in self.servers if server.lost is None]

    def lost(self) -> list[ServerHandle]:
        return [server for server in self.servers if server.lost is not None]

    def reasons(self) -> str:
        """Return why each server is lost."""
        return "; ".join(f"{server.url}: {server.lost}" for server in self.servers)

    def caps(self, usable: Sequence[ServerHandle]) -> dict[ServerHandle, int]:
        """Return the most requests of this process at each of these servers (DIST-03).

        They are its shares of all servers, so they do not depend on what another process has
        lost. A process that has no share at any of them gets one place at each.
        """
        sizes = [server.world_size for server in self.servers]
        caps = rank_caps(self.decode_batch_size, sizes, self.peers.count, self.peers.rank)
        shares = dict(zip(self.servers, caps, strict=True))
        here = {server: shares[server] for server in usable}
        return here if any(here.values()) else dict.fromkeys(here, 1)

    def wait_for(self, find: Callable[[], list[T]]) -> list[T]:
        """Call `find` until it returns a server.

        Raises:
            RunError: for `timeout_s` no server was starting or needed only a push, or none came
                back within LONGEST_WAIT_S.
        """
        began = last_sign = self.clock()
        pause_s = _FIRST_PAUSE_S
        with waiting_for("a rollout server to come back", self.reasons):
            while not (found := find()):
                now = self.clock()
                if any(server.starting or server.wants_push for server in self.servers):
                    last_sign = now
                limit_s, name = LONGEST_WAIT_S, "the longest wait"
                if now - last_sign > self.timeout_s:
                    limit_s, name = self.timeout_s, "rollout_matching.vllm.server.timeout_s"
                if now - began > limit_s:
                    raise RunError(
                        f"no rollout server can take a push and answer; waited {limit_s:.0f} s "
                        f"({name}) for one to come back or to start. {self.reasons()}"
                    )
                self.clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return found


class Dispatch:
    """One rollout over the servers of a pool: one answer for each request.

    config: request i has `seed + i` (SEED-01). version: of the weights that must answer; None: any.
    reconnect: uses lost servers again that can be used, and returns all usable servers; called
        before every chunk, and repeatedly while no server is usable.
    """

    def __init__(
        self,
        requests: Sequence[RolloutInferRequest],
        config: RequestConfig,
        version: int | None,
        pool: ServerPool,
        reconnect: Callable[[], list[ServerHandle]],
    ) -> None:
        self._requests = requests
        self._config = config
        self._version = version
        self._pool = pool
        self._reconnect = reconnect
        self._id = uuid4().hex
        self._envelopes: dict[int, RolloutEnvelope] = {}
        self._queues: dict[ServerHandle, deque[RequestPart]] = {
            one: deque() for one in pool.servers
        }
        self._caps: dict[ServerHandle, int] = {}
        self._unassigned = len(requests)
        # Running calls; with the `returns` of the server when each began.
        self._calls: dict[Future[list[RolloutEnvelope]], tuple[ServerHandle, RequestPart, int]] = {}
        self._outages: list[float] = []  # since the last answer: when no server was usable
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Give up from another thread; `chunks` raises RunError soon."""
        self._given_up.set()

    def chunks(self, size: int) -> Generator[list[RolloutEnvelope], None, None]:
        """Yield one envelope per request, in order, `size` at a time.

        Between two chunks running calls go on, and none is started. When the generator is closed,
        and after an error, running calls end soon.

        Raises:
            RunError: no server answers, a request was refused, or the run was given up.
        """
        chunks = cut(len(self._requests), size)
        later = deque(chunks)
        try:
            for chunk in chunks:
                while later and later[0].start <= chunk.start + CHUNKS_AHEAD * size:
                    self._reconnect()
                    self._unassigned -= len(later[0])
                    self._split(RequestPart(later.popleft()), owner=None)
                self._send()
                while not self._envelopes.keys() >= set(chunk):
                    self._take()
                    self._send()
                yield [self._envelopes.pop(index) for index in chunk]
        finally:
            self._given_up.set()

    def _split(self, part: RequestPart, owner: ServerHandle | None) -> None:
        """Split a part among the usable servers. owner: the server that lost it, if any."""
        if not (usable := self._pool.usable()):
            self._end_if_fruitless()
            usable = self._pool.wait_for(self._reconnect)
        caps = self._pool.caps(usable)
        self._caps |= caps
        chunks = plan_chunks(len(part.requests), list(caps.values()))
        for server, chunk in zip(caps, chunks, strict=True):
            requests = part.requests[chunk.start : chunk.stop]
            if not requests:
                continue
            queue = [*self._queues[server], RequestPart(requests, part.tried)]
            self._queues[server] = deque(sorted(queue, key=lambda each: each.requests.start))
            if owner not in (None, server):
                self._pool.journal.split(server.url, requests)

    def _end_if_fruitless(self) -> None:
        """Raise RunError if servers only come back to be lost again."""
        self._outages.append(self._pool.clock())
        returns, in_vain_s = len(self._outages) - 1, self._outages[-1] - self._outages[0]
        if returns >= FRUITLESS_RETURNS and in_vain_s > self._pool.timeout_s:
            raise RunError(
                f"no rollout server answers, though some came back {returns} times in "
                f"{in_vain_s:.0f} s ({self._pool.reasons()})"
            )

    def _send(self) -> None:
        for server in self._pool.servers:
            while (part := self._next_part(server)) is not None:
                call = self._call(part.requests)
                answer = partial(server.answer, call, part, self._given_up)
                self._calls[in_thread(answer)] = (server, part, server.returns)

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

    def _next_part(self, server: ServerHandle) -> RequestPart | None:
        """Take the requests of the next call from a server's queue; None without a free place."""
        queue = self._queues[server]
        most = max(1, self._caps.get(server, 0))
        waiting = self._unassigned + sum(len(part.requests) for part in queue)
        running = [len(part.requests) for each, part, _ in self._calls.values() if each is server]
        free = most - sum(running)
        count = next_call(waiting, free, most, self._pool.peers.count, len(running))
        if not queue or count == 0:
            return None
        requests, tried = queue.popleft()
        if rest := requests[count:]:
            queue.appendleft(RequestPart(rest, tried))
        return RequestPart(requests[:count], tried)

    def _take(self) -> None:
        """Wait for the next call that ends."""
        outcome = next(as_completed(self._calls))
        server, part, returns = self._calls.pop(outcome)
        try:
            envelopes = outcome.result()
        except ServerLost as error:
            if self._given_up.is_set():
                raise RunError("the rollout was given up") from error
            self._queues[server].appendleft(RequestPart(part.requests, error.tried))
            server.lose(str(error), returns)
        else:
            self._envelopes |= zip(part.requests, envelopes, strict=True)
            self._outages.clear()
            if not server.lose_if_restarted(envelopes, returns):
                return
        left = list(self._queues[server])
        self._queues[server].clear()
        for part in left:
            self._split(part, server)
