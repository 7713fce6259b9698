"""One rollout over several servers: requests out, answers in, each exactly once (DIST-01..05).

split    a chunk for every server that can be used
send     each server gets its chunk in calls that have places, independent of the others
take     an answer; or a lost server, whose chunk is split among the others
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

from learner.rollout.backend import Journal
from learner.rollout.distribution import most_at_once, next_call, plan_chunks
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
    wait_for_one: blocks until a lost server can be used again; raises if none can.
    patience_s: seconds in which servers can come back and be lost again.
    """

    def __init__(
        self,
        job: Job,
        servers: Sequence[ServerHandle],
        caps: Caps,
        journal: Journal,
        wait_for_one: Callable[[], object],
        patience_s: float,
        learner_world_size: int = 1,
    ) -> None:
        self._job = job
        self._servers = servers
        self._caps_of = caps
        self._journal = journal
        self._wait_for_one = wait_for_one
        self._patience_s = patience_s
        self._learner_world_size = learner_world_size
        self._envelopes: dict[int, RolloutEnvelope] = {}
        self._queues: dict[ServerHandle, deque[Part]] = {server: deque() for server in servers}
        self._caps: dict[ServerHandle, int] = {}
        self._in_flight: Counter[ServerHandle] = Counter()
        self._calls: Calls[tuple[ServerHandle, Part, int], list[RolloutEnvelope]] = Calls()
        self._returns: list[float] = []
        self._over = threading.Event()

    def give_up(self) -> None:
        """Give up from another thread; `run` raises RunError soon."""
        self._over.set()

    def run(self) -> list[RolloutEnvelope]:
        """Return one envelope per request, in order. After an error, running calls end soon.

        Raises:
            RunError: no server answers, a request was refused, or the run was given up.
        """
        count = len(self._job.requests)
        try:
            self._split(Part(range(count)), owner=None)
            while len(self._envelopes) < count:
                self._send()
                self._take()
        finally:
            self._over.set()
        return [self._envelopes[index] for index in range(count)]

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
            self._queues[server].append(Part(requests, part.tried))
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
            self._returns.append(time.monotonic())
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
                call = self._job.call(part.requests)
                self._calls.start(
                    (server, part, server.returns), partial(server.answer, call, part, self._over)
                )

    def _next_part(self, server: ServerHandle) -> Part | None:
        """Take the requests of the next call from a server's queue; None without a free place."""
        queue = self._queues[server]
        most = most_at_once(self._caps.get(server, 0), self._job.config.n)
        free = most - self._in_flight[server]
        if not queue or free <= 0:
            return None
        waiting = sum(len(part.requests) for part in queue)
        count = next_call(waiting, free, most, self._learner_world_size)
        requests, tried = queue.popleft()
        if rest := requests[count:]:
            queue.appendleft(Part(rest, tried))
        return Part(requests[:count], tried)

    def _take(self) -> None:
        (server, part, returns), outcome = self._calls.take()
        self._in_flight[server] -= len(part.requests)
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
