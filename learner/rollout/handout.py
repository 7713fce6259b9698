"""One rollout over several servers: requests out, answers in, each exactly once (DIST-01..05).

share    a chunk for every server that may be asked
send     each server works through its chunk in slices of at most its cap, on its own
take     an answer, or a server that was lost: its chunk is shared among the others
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

from learner.rollout.distribution import call_size, plan_chunks
from learner.rollout.journal import Journal
from learner.rollout.member import Member, Part, ServerLost
from learner.rollout.parallel import Calls
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
        """The same requests make the same call, id included: a retry is known as one."""
        config = self.config
        if config.seed is not None:
            config = config.model_copy(update={"seed": config.seed + requests.start})
        return InferCall(
            infer_requests=list(self.requests[requests.start : requests.stop]),
            request_config=config,
            request_id=f"{self.job_id}-{requests.start}-{requests.stop}",
            expected_weights_version=self.version,
        )


class Handout:
    """Runs a job.

    members: all servers, also those that are lost. caps: of this process (`rank_caps`).
    wait_for_one: blocks until a lost member may be asked again; raises when none will be.
    patience_s: how long members may come back in vain.
    """

    def __init__(
        self,
        job: Job,
        members: Sequence[Member],
        caps: Caps,
        journal: Journal,
        wait_for_one: Callable[[], object],
        patience_s: float,
    ) -> None:
        self._job = job
        self._members = members
        self._caps_of = caps
        self._journal = journal
        self._wait_for_one = wait_for_one
        self._patience_s = patience_s
        self._envelopes: dict[int, RolloutEnvelope] = {}
        self._shares: dict[Member, deque[Part]] = {member: deque() for member in members}
        self._caps: dict[Member, int] = {}
        self._busy: set[Member] = set()
        self._calls: Calls[tuple[Member, Part, int], list[RolloutEnvelope]] = Calls()
        self._returns: list[float] = []
        self._over = threading.Event()

    def give_up(self) -> None:
        """Nobody wants the answers any more, says another thread: `run` raises RunError soon."""
        self._over.set()

    def run(self) -> list[RolloutEnvelope]:
        """One envelope per request, in order; after an error no call goes on for long.

        Raises:
            RunError: no server answers any more, a request was refused, or it was given up.
        """
        count = len(self._job.requests)
        try:
            self._share(Part(range(count)), owner=None)
            while len(self._envelopes) < count:
                self._send()
                self._take()
        finally:
            self._over.set()
        return [self._envelopes[index] for index in range(count)]

    def _share(self, part: Part, owner: Member | None) -> None:
        """owner: who lost the part; None: nobody had it yet."""
        members = self._askable()
        caps = self._caps_at(members)
        self._caps |= zip(members, caps, strict=True)
        chunks = plan_chunks(len(part.requests), caps)
        for member, chunk in zip(members, chunks, strict=True):
            requests = part.requests[chunk.start : chunk.stop]
            if not requests:
                continue
            self._shares[member].append(Part(requests, part.tried))
            if owner not in (None, member):
                self._journal.split(member.url, requests)

    def _caps_at(self, askable: Sequence[Member]) -> list[int]:
        """Of places at all servers, so that it does not matter whom another process has lost.

        A process that has no place where it may ask has one request in flight there.
        """
        caps = self._caps_of([member.world_size for member in self._members])
        at = dict(zip(self._members, caps, strict=True))
        here = [at[member] for member in askable]
        return here if any(here) else [1] * len(askable)

    def _askable(self) -> list[Member]:
        """The members that may be asked; waits when there is none."""
        if all(member.lost is not None for member in self._members):
            self._returns.append(time.monotonic())
            self._end_if_fruitless()
            self._wait_for_one()
        return [member for member in self._members if member.lost is None]

    def _end_if_fruitless(self) -> None:
        in_vain_s = self._returns[-1] - self._returns[0]
        if len(self._returns) > FRUITLESS_RETURNS and in_vain_s > self._patience_s:
            reasons = "; ".join(f"{member.url}: {member.lost}" for member in self._members)
            raise RunError(
                f"no rollout server answers, though some came back {len(self._returns) - 1} "
                f"times in {in_vain_s:.0f} s ({reasons})"
            )

    def _send(self) -> None:
        for member, share in self._shares.items():
            if share and member not in self._busy:
                part = self._next_slice(member)
                self._busy.add(member)
                call = self._job.call(part.requests)
                self._calls.start(
                    (member, part, member.returns), partial(member.answer, call, part, self._over)
                )

    def _next_slice(self, member: Member) -> Part:
        """The first requests of a member's share, at most as many as it decodes at once."""
        share = self._shares[member]
        requests, tried = share.popleft()
        most = call_size(self._caps[member], self._job.config.n)
        if rest := requests[most:]:
            share.appendleft(Part(rest, tried))
        return Part(requests[:most], tried)

    def _take(self) -> None:
        (member, part, returns), outcome = self._calls.take()
        self._busy.discard(member)
        try:
            envelopes = outcome.result()
        except ServerLost as error:
            if self._over.is_set():
                raise RunError("the rollout was given up") from error
            self._shares[member].appendleft(Part(part.requests, error.tried))
            self._lose(member, str(error), returns)
            return
        self._envelopes |= zip(part.requests, envelopes, strict=True)
        self._returns.clear()
        if member.restarted(envelopes):
            self._lose(member, "the server or one of its replicas was started anew", returns)

    def _lose(self, member: Member, reason: str, returns: int) -> None:
        """returns: of the member, when it was asked; it may have come back since."""
        member.lose(reason, returns)
        share = list(self._shares[member])
        self._shares[member].clear()
        for part in share:
            self._share(part, member)
