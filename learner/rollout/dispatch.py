"""One rollout over several servers: requests out, answers in, each exactly once (DIST-01..05).

    chunk -> _split   a part for every server that can be used
          -> _send    each server gets its parts in calls that have places
          -> _take    an answer; or a lost server, whose parts are split among the others
          -> chunk    its answers, in order, as soon as all are there

The places of a server are filled again across the borders of chunks: while a chunk lacks its last
answers, requests of the next CHUNKS_AHEAD chunks are sent.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

from learner.rollout.backend import Journal
from learner.rollout.distribution import (
    CHUNKS_AHEAD,
    cut,
    most_at_once,
    next_call,
    plan_chunks,
)
from learner.rollout.parallel_calls import Calls
from learner.rollout.server_handle import Part, ServerHandle, ServerLost
from shared_contracts.errors import RunError
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope, RolloutInferRequest

# Most requests in flight at each server, of which the world sizes are given.
Caps = Callable[[Sequence[int]], Sequence[int]]

# Servers that come back and are lost again without one answer end the run.
FRUITLESS_RETURNS = 3


@dataclass(frozen=True)
class Job:
    """The requests of one rollout; request i is sampled with `seed + i` (SEED-01).

    version: of the weights that must answer; None: any.
    """

    requests: Sequence[RolloutInferRequest]
    config: RequestConfig
    version: int | None
    job_id: str = field(default_factory=lambda: uuid4().hex)

    def call(self, requests: range) -> InferCall:
        """Make the call. The same requests give the same id, so the server recognizes a retry."""
        config = self.config
        if config.seed is not None:
            config = config.model_copy(update={"seed": config.seed + requests.start})
        return InferCall(
            infer_requests=list(self.requests[requests.start : requests.stop]),
            request_config=config,
            request_id=f"{self.job_id}-{requests.start}-{requests.stop}",
            expected_weights_version=self.version,
        )


class Dispatch:
    """The run of one job over the servers.

    servers: all servers, also those that are lost. caps: of this process (`rank_caps`).
    learner_world_size: the number of processes.
    look: takes back lost servers that can be used again; called before every chunk.
    wait_for_one: blocks until a lost server can be used again; raises if none can.
    patience_s: seconds in which servers can come back and be lost again; measured by `clock`.
    """

    def __init__(
        self,
        job: Job,
        servers: Sequence[ServerHandle],
        caps: Caps,
        journal: Journal,
        look: Callable[[], object],
        wait_for_one: Callable[[], object],
        patience_s: float,
        learner_world_size: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._servers = servers
        self._caps_of = caps
        self._journal = journal
        self._look = look
        self._wait_for_one = wait_for_one
        self._patience_s = patience_s
        self._learner_world_size = learner_world_size
        self._clock = clock
        self._envelopes: dict[int, RolloutEnvelope] = {}
        self._queues: dict[ServerHandle, deque[Part]] = {server: deque() for server in servers}
        self._caps: dict[ServerHandle, int] = {}
        self._to_come = len(job.requests)  # that no server has been given
        self._in_flight: Counter[ServerHandle] = Counter()  # requests
        self._running: Counter[ServerHandle] = Counter()  # calls
        self._calls: Calls[tuple[ServerHandle, Part, int], list[RolloutEnvelope]] = Calls()
        self._returns: list[float] = []
        self._over = threading.Event()

    def give_up(self) -> None:
        """Give up from another thread; `chunks` raises RunError soon."""
        self._over.set()

    def chunks(self, size: int) -> Generator[list[RolloutEnvelope], None, None]:
        """Yield one envelope per request, in order, `size` at a time.

        Calls that run go on while nobody asks for the next chunk, and no new ones are made then.
        When the generator is closed, and after an error, running calls end soon.

        Raises:
            RunError: no server answers, a request was refused, or the run was given up.
        """
        chunks = cut(len(self._job.requests), size)
        later = deque(chunks)
        try:
            for chunk in chunks:
                while later and later[0].start <= chunk.start + CHUNKS_AHEAD * size:
                    self._look()
                    self._to_come -= len(later[0])
                    self._split(Part(later.popleft()), owner=None)
                self._send()
                while not self._envelopes.keys() >= set(chunk):
                    self._take()
                    self._send()
                yield [self._envelopes.pop(index) for index in chunk]
        finally:
            self._over.set()

    def _split(self, part: Part, owner: ServerHandle | None) -> None:
        """Split a part among the servers. owner: the server that lost it; None: a new part."""
        servers = self._askable()
        caps = self._caps_at(servers)
        self._caps |= zip(servers, caps, strict=True)
        chunks = plan_chunks(len(part.requests), caps)
        for server, chunk in zip(servers, chunks, strict=True):
            requests = part.requests[chunk.start : chunk.stop]
            if not requests:
                continue
            queue = [*self._queues[server], Part(requests, part.tried)]
            self._queues[server] = deque(sorted(queue, key=lambda each: each.requests.start))
            if owner not in (None, server):
                self._journal.split(server.url, requests)

    def _caps_at(self, askable: Sequence[ServerHandle]) -> list[int]:
        """Of places at all servers, so that it does not matter whom another process has lost.

        A process that has no place where it may ask has one request in flight there.
        """
        caps = self._caps_of([server.world_size for server in self._servers])
        at = dict(zip(self._servers, caps, strict=True))
        here = [at[server] for server in askable]
        return here if any(here) else [1] * len(askable)

    def _askable(self) -> list[ServerHandle]:
        """Return the servers that can be used; waits if there is none."""
        if all(server.lost is not None for server in self._servers):
            self._returns.append(self._clock())
            self._end_if_fruitless()
            self._wait_for_one()
        return [server for server in self._servers if server.lost is None]

    def _end_if_fruitless(self) -> None:
        in_vain_s = self._returns[-1] - self._returns[0]
        if len(self._returns) > FRUITLESS_RETURNS and in_vain_s > self._patience_s:
            reasons = "; ".join(f"{server.url}: {server.lost}" for server in self._servers)
            raise RunError(
                f"no rollout server answers, though some came back {len(self._returns) - 1} "
                f"times in {in_vain_s:.0f} s ({reasons})"
            )

    def _send(self) -> None:
        for server in self._servers:
            while (part := self._next_part(server)) is not None:
                self._in_flight[server] += len(part.requests)
                self._running[server] += 1
                call = self._job.call(part.requests)
                self._calls.start(
                    (server, part, server.returns), partial(server.answer, call, part, self._over)
                )

    def _next_part(self, server: ServerHandle) -> Part | None:
        """Take the requests of the next call from a server's queue; None without a free place."""
        queue = self._queues[server]
        most = most_at_once(self._caps.get(server, 0), self._job.config.n)
        waiting = self._to_come + sum(len(part.requests) for part in queue)
        free, running = most - self._in_flight[server], self._running[server]
        count = next_call(waiting, free, most, self._learner_world_size, running)
        if not queue or count == 0:
            return None
        requests, tried = queue.popleft()
        if rest := requests[count:]:
            queue.appendleft(Part(rest, tried))
        return Part(requests[:count], tried)

    def _take(self) -> None:
        (server, part, returns), outcome = self._calls.take()
        self._in_flight[server] -= len(part.requests)
        self._running[server] -= 1
        try:
            envelopes = outcome.result()
        except ServerLost as error:
            if self._over.is_set():
                raise RunError("the rollout was given up") from error
            self._queues[server].appendleft(Part(part.requests, error.tried))
            self._lose(server, str(error), returns)
            return
        self._envelopes |= zip(part.requests, envelopes, strict=True)
        self._returns.clear()
        if server.restarted(envelopes):
            self._lose(server, "the server or one of its replicas was restarted", returns)

    def _lose(self, server: ServerHandle, reason: str, returns: int) -> None:
        """returns: of the server, when it was asked; it may have come back since."""
        server.lose(reason, returns)
        left = list(self._queues[server])
        self._queues[server].clear()
        for part in left:
            self._split(part, server)
