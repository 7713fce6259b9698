"""One server of the backend: usable, lost, and usable again (DIST-05, SYNC-07, SYNC-08).

may be asked --- an answer fails for good, or comes of another epoch ---> lost
     ^                                                                     |
     +--- the leader pushes the weights again; followers see that it has --+
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_when_event_set,
    wait_exponential,
)

from learner.rollout.backend import Call, Journal
from learner.rollout.client import (
    SERVER_ERRORS,
    OtherWeights,
    RolloutClient,
    TooManyCalls,
    may_pass,
    needs_push,
)
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.server_info import Info

_LOG = logging.getLogger(__name__)

Sleep = Callable[[float], None]
# What the server at a URL has otherwise than this run needs it.
Differences = Callable[[str, Info], Sequence[ContractError]]

# Samples that an error names.
_NAMED = 5
# Of one call at one server, before it is lost.
ATTEMPTS = 4
_BACKOFF = wait_exponential(multiplier=0.5, max=8.0)
_LONGEST_PAUSE_S = 60.0
# Not the global generator, whose state belongs to the training.
_JITTER = random.Random()


class Standing(NamedTuple):
    """The state of a server that process 0 sends to the others; JSON values only.

    server_epoch: None before its weight group was formed. lost: why it may not be asked.
    """

    server_epoch: str | None
    world_size: int
    lost: str | None


class Part(NamedTuple):
    """Consecutive requests of a rollout, and how often they were tried before."""

    requests: range
    tried: int = 0


class ServerLost(Exception):
    """A server that cannot answer now, also after retries; another one may.

    tried: attempts at its part so far.
    """

    def __init__(self, reason: str, tried: int) -> None:
        super().__init__(reason)
        self.tried = tried


def no_differences(url: str, info: Info) -> Sequence[ContractError]:
    """Any server will do."""
    return ()


class ServerHandle:
    """A server, for a process that does not push to it.

    It may be asked by one thread and taken back by another.

    url: names it in logs. sleep: pauses between attempts.
    differences: looked for before a lost server is asked again, as it may be another one now.
    world_size: its engine workers; asked once, and known anew with every epoch.
    lost: why it may not be asked now; None: it may. returns: how often it came back.
    starting: the newest look found that it is there and its engines are being built.
    wants_push: the newest look found that it lacks nothing but a push.
    """

    def __init__(
        self,
        client: RolloutClient,
        journal: Journal,
        sleep: Sleep = time.sleep,
        differences: Differences = no_differences,
    ) -> None:
        self.url = client.base_url
        self.world_size = client.world_size()
        self.lost: str | None = None
        self.returns = 0
        self.starting = False
        self.wants_push = False
        self._client = client
        self._journal = journal
        self._sleep = sleep
        self._differences = differences
        self._epoch: str | None = None
        self._changing = threading.Lock()  # whether it is lost

    def answer(
        self, call: InferCall, part: Part, given_up: threading.Event
    ) -> list[RolloutEnvelope]:
        """One envelope per request, of the expected weights.

        given_up: set when nobody wants the answer any more; ends the call and its retries.

        Raises:
            ServerLost: every attempt failed, or the server needs a push; or it was given up.
            RunError, ContractError: what would fail at any server.
        """
        tried, epoch = part.tried, self._epoch

        def ask() -> list[RolloutEnvelope]:
            nonlocal tried, epoch
            if given_up.is_set():
                raise ServerLost("the call was given up", tried)
            tried, epoch = tried + 1, self._epoch
            return self._ask(call, part.requests, tried, given_up)

        retry = Retrying(
            retry=retry_if_exception(may_pass),
            stop=stop_after_attempt(ATTEMPTS) | stop_when_event_set(given_up),
            wait=_pause_s,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return retry(ask)
        except SERVER_ERRORS as error:
            if may_pass(error) or needs_push(error) or self._lost_weights(error, epoch):
                raise ServerLost(str(error), tried) from error
            if isinstance(error, ProblemError) and error.problem.errors:
                raise ProblemError(_named(error.problem, call)) from error
            raise

    def restarted(self, envelopes: Sequence[RolloutEnvelope]) -> bool:
        """Return whether answers show that the server or a replica was restarted."""
        epochs = {envelope.coordexp.server_epoch for envelope in envelopes}
        return self._epoch is not None and epochs != {self._epoch}

    def lose(self, reason: str, returns: int | None = None) -> bool:
        """Mark it as lost; returns false if it was lost already.

        returns: when it was asked in vain; it may have been lost or have come back since.
        """
        with self._changing:
            if returns is not None and (self.lost is not None or returns != self.returns):
                return False
            if self.lost is None:
                _LOG.warning("rollout server %s is lost: %s", self.url, reason)
                self._journal.lost(self.url, reason)
            self.lost = reason
            return True

    def standing(self) -> Standing:
        return Standing(self._epoch, self.world_size, self.lost)

    def adopt(self, standing: Standing) -> None:
        """Adopt the state that process 0 has; process 0 has already logged a loss."""
        self._epoch, self.world_size = standing.server_epoch, standing.world_size
        self.lost = standing.lost
        if standing.lost is None:
            self._is_back()

    def rejoin(self, version: int | None) -> None:
        """Use a lost server again if it reports the weights `version`; None: any.

        Nothing is pushed to it. It then is the server of its present epoch. Two quick calls.
        """
        try:
            self._client.health()
            info = self._client.info()
        except SERVER_ERRORS as error:
            self.stays_lost(error)
            return
        held = info.weights_version
        if found := self._differences(self.url, info):
            self.stays_lost(RunError("; ".join(map(str, found))))
        elif version is not None and (info.weights_state, held) != ("READY", version):
            says = f"its weights are {held} ({info.weights_state}), and {version} is not pushed yet"
            self.stays_lost(RunError(says), wants_push=held <= version)
        else:
            self._epoch, self.world_size = info.server_epoch, info.world_size
            self._is_back()
            _LOG.warning("rollout server %s is back", self.url)

    def stays_lost(self, error: RunError, wants_push: bool = False) -> None:
        """Note why it cannot be used yet."""
        self.lost = str(error)
        self.starting = isinstance(error, ProblemError) and error.problem.kind == "not-ready"
        self.wants_push = wants_push or needs_push(error)

    def close(self) -> None:
        self._client.close()

    def _is_back(self) -> None:
        with self._changing:
            self.lost = None
            self.returns += 1
        self.starting = self.wants_push = False

    def _ask(
        self, call: InferCall, requests: range, attempt: int, given_up: threading.Event
    ) -> list[RolloutEnvelope]:
        seed = None if call.request_config is None else call.request_config.seed
        note = partial(Call, self.url, requests.start, len(requests), seed, attempt)
        try:
            envelopes = self._client.infer(call, self._epoch, given_up)
            _require_weights(call, envelopes, self.url)
        except SERVER_ERRORS as error:
            self._journal.call(note(outcome=str(error)))
            raise
        self._journal.call(note(outcome="answered"))
        return envelopes

    def _lost_weights(self, error: BaseException, epoch: str | None) -> bool:
        """Return whether unexpected weights come from a restart, not from another learner.

        epoch: of the server when it was asked; it may be back by now.
        """
        if not isinstance(error, OtherWeights):
            return False
        try:
            return self._client.live().server_epoch != epoch
        except SERVER_ERRORS:
            return True


def _named(problem: Problem, call: InferCall) -> Problem:
    """A refusal that names the samples it is about: the uuid of each request."""
    indices = [error.get("index") for error in problem.errors or []]
    known = [i for i in indices if type(i) is int and 0 <= i < len(call.infer_requests)]
    if not known:
        return problem
    samples = [str(call.infer_requests[index].uuid) for index in known]
    more = f" and {len(samples) - _NAMED} more" if len(samples) > _NAMED else ""
    detail = f"{problem.detail}; of {', '.join(samples[:_NAMED])}{more}"
    return problem.model_copy(update={"detail": detail})


def _pause_s(state: RetryCallState) -> float:
    """Return the pause: longer after every attempt, and at least `Retry-After`."""
    assert state.outcome is not None
    error = state.outcome.exception()
    asked_s = error.retry_after_s if isinstance(error, TooManyCalls) else None
    pause_s = max(_BACKOFF(state), min(asked_s or 0.0, _LONGEST_PAUSE_S))
    return pause_s * _JITTER.uniform(1.0, 1.5)


def _require_weights(call: InferCall, envelopes: Sequence[RolloutEnvelope], url: str) -> None:
    """Raises OtherWeights for an answer that other weights than expected had a part in."""
    expected = call.expected_weights_version
    for envelope in envelopes:
        versions = set(envelope.coordexp.weights_version)
        if expected is not None and versions != {expected}:
            found = f"version {expected} is expected, and {sorted(versions)} answered"
            raise OtherWeights(Problem.of("other-weights", found, f"POST {url}/infer/"))
