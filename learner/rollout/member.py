"""One server of the backend: asked, pushed to, lost and taken back (DIST-05, SYNC-07).

may be asked --- an answer fails for good, or comes of another epoch ---> lost
     ^                                                                     |
     +--- its group is formed anew, and the weights are pushed again <-----+
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

from learner.rollout.backend import WeightChannel
from learner.rollout.client import (
    SERVER_ERRORS,
    OtherWeights,
    RolloutClient,
    ServerUnreachable,
    TooManyCalls,
    may_pass,
    needs_push,
)
from learner.rollout.journal import Call, Journal
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.server_info import Info

_LOG = logging.getLogger(__name__)

Sleep = Callable[[float], None]
# What the server at a URL has otherwise than this run needs it.
Differences = Callable[[str, Info], Sequence[ContractError]]

# Of one call at one server, before it is lost.
ATTEMPTS = 4
_BACKOFF = wait_exponential(multiplier=0.5, max=8.0)
_LONGEST_PAUSE_S = 60.0
# After a take-back that failed, before the next one: doubled each time, up to the longest.
FIRST_REST_S = 5.0
_LONGEST_REST_S = 300.0
# Not the global generator, whose state belongs to the training.
_JITTER = random.Random()


class Part(NamedTuple):
    """Requests of a rollout that lie together, and how often they were tried before."""

    requests: range
    tried: int = 0


class ServerLost(Exception):
    """A server cannot answer now, however often it is asked; another one may.

    tried: attempts at its part so far.
    """

    def __init__(self, reason: str, tried: int) -> None:
        super().__init__(reason)
        self.tried = tried


def no_differences(url: str, info: Info) -> Sequence[ContractError]:
    """Any server will do."""
    return ()


class Member:
    """A server with its weight channel.

    url: names it in logs. sleep: pauses between attempts.
    differences: looked for before a lost server is pushed to, as it may be another one now.
    world_size: its engine workers; asked once, and known anew with every group.
    lost: why it may not be asked now; None: it may.
    starting: the newest look found that it is there and its engines are being built.
    """

    def __init__(
        self,
        client: RolloutClient,
        channel: WeightChannel,
        journal: Journal,
        sleep: Sleep = time.sleep,
        differences: Differences = no_differences,
    ) -> None:
        self.url = client.base_url
        self.world_size = client.world_size()
        self.lost: str | None = None
        self.starting = False
        self._client = client
        self._channel = channel
        self._journal = journal
        self._sleep = sleep
        self._differences = differences
        self._epoch: str | None = None
        self._taken: int | None = None  # the version it has, unless something happened to it
        self._rest_s = self._rests_until = 0.0

    def connect(self) -> int:
        """Form the weight group; returns the server's weights version."""
        ready = self._channel.connect()
        self._epoch, self.world_size = ready.server_epoch, ready.world_size - 1
        return ready.weights_version

    def push(self, version: int, again: bool = False) -> None:
        """Make `version` the server's weights; it may be asked from then on.

        Raises:
            RunError: the push broke, or did not reach every replica.
        """
        self.connect()
        try:
            report = self._channel.push(version)
        except RunError as error:
            self._taken = version if _answer_was_lost(error) else None
            raise
        self._taken = version
        self.connect()  # it may have formed the group anew
        if report.status.server_epoch != self._epoch:
            raise RunError(f"{self.url} lost a replica while weights were pushed")
        self._journal.push(self.url, again, report)
        self.lost = None

    def answer(
        self, call: InferCall, part: Part, given_up: threading.Event
    ) -> list[RolloutEnvelope]:
        """One envelope per request, of the expected weights.

        given_up: set when nobody wants the answer any more; ends the call and its retries.

        Raises:
            ServerLost: every attempt failed, or the server needs a push; or it was given up.
            RunError, ContractError: what would fail at any server.
        """
        tried = part.tried

        def ask() -> list[RolloutEnvelope]:
            nonlocal tried
            if given_up.is_set():
                raise ServerLost("the call was given up", tried)
            tried += 1
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
            if may_pass(error) or needs_push(error) or self._lost_weights(error):
                raise ServerLost(str(error), tried) from error
            raise

    def restarted(self, envelopes: Sequence[RolloutEnvelope]) -> bool:
        """Whether answers tell that the server, or a replica, was started anew."""
        epochs = {envelope.coordexp.server_epoch for envelope in envelopes}
        return self._epoch is not None and epochs != {self._epoch}

    def lose(self, reason: str) -> None:
        """Ask it no more until it is taken back."""
        if self.lost is None:
            _LOG.warning("rollout server %s is lost: %s", self.url, reason)
            self._journal.lost(self.url, reason)
        self.lost = reason
        self._channel.abandon()

    def look(self) -> bool:
        """Whether a lost server could take a push now; one quick call."""
        try:
            self._client.check_pushable()
        except SERVER_ERRORS as error:
            self.lost = str(error)
            self.starting = isinstance(error, ProblemError) and error.problem.kind == "not-ready"
            return False
        self.starting = False
        return True

    def rests(self) -> bool:
        """Whether it failed to come back, so lately that it is not tried again yet."""
        return time.monotonic() < self._rests_until

    def take_back(self, version: int | None) -> None:
        """Ask it again, once it has the weights `version`; None: any will do.

        A push whose answer was lost is not made twice, which the server would refuse.
        Raises what `push` raises, SERVER_ERRORS, and RunError for a server that differs.
        After a failure it `rests`, longer every time.
        """
        try:
            self._bring_back(version)
        except RunError as error:
            self._rest_s = min(max(FIRST_REST_S, 2 * self._rest_s), _LONGEST_REST_S)
            self._rests_until = time.monotonic() + self._rest_s
            if self.lost != str(error):
                _LOG.warning("rollout server %s stays lost: %s", self.url, error)
            raise
        self._rest_s = self._rests_until = 0.0
        self.lost = None
        _LOG.warning("rollout server %s is back", self.url)

    def close(self) -> None:
        self._channel.close()
        self._client.close()

    def _bring_back(self, version: int | None) -> None:
        info = self._client.info()
        if found := self._differences(self.url, info):
            raise RunError("; ".join(map(str, found)))
        if version is not None and not self._holds(version, info):
            self.push(version, again=True)
        elif self._epoch is not None:
            self._epoch, self.world_size = info.server_epoch, info.world_size

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

    def _lost_weights(self, error: BaseException) -> bool:
        """Whether other weights than expected come from a new start, and not a new learner."""
        if not isinstance(error, OtherWeights):
            return False
        try:
            return self._client.live().server_epoch != self._epoch
        except SERVER_ERRORS:
            return True

    def _holds(self, version: int, info: Info) -> bool:
        """Whether it was pushed this version, and nothing was started anew since.

        What it says of itself is believed only where no push is known to have failed.
        """
        held = (info.server_epoch, info.weights_state, info.weights_version)
        return self._taken == version and held == (self._epoch, "READY", version)


def _answer_was_lost(error: RunError) -> bool:
    """Whether a push broke in such a way that it may have got through."""
    return isinstance(error.__cause__, (ServerUnreachable, TimeoutError))


def _pause_s(state: RetryCallState) -> float:
    """Longer after every attempt, and at least what a busy server asks for."""
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
