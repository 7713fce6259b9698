"""One rollout server: calls with retries, whether it is usable, pushes to it (DIST-05, SYNC-07).

usable --- an answer fails for good, or shows another epoch ---> lost
   ^                                                              |
   +--- process 0 pushes its weights again; the other processes reconnect
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from tenacity import (
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_when_event_set,
    wait_exponential,
)

from learner.rollout.backend import ANSWERED, Call, Journal
from learner.rollout.client import (
    CLOCK,
    SERVER_ERRORS,
    Clock,
    RolloutClient,
    may_be_of_a_proxy,
    may_pass,
    needs_push,
)
from learner.rollout.sync.push import WeightPusher
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.server_info import Info
from shared_contracts.weights import DtypeName, SyncReport

_LOG = logging.getLogger(__name__)

# What a server has otherwise than this run needs: of its URL and its `/info/`.
Differences = Callable[[str, Info], Iterable[ContractError]]

# Of one call at one server, before the server is lost.
ATTEMPTS = 4
_BACKOFF = wait_exponential(max=8.0)
_PROXY = (
    ". If every attempt ends after the same time, a proxy ends long calls: raise its read timeout; "
    "or lower rollout_matching.decode_batch_size, so that a call has fewer requests; or write the "
    "server's own address in rollout_matching.vllm.server.servers[].base_url"
)
# Samples that an error names.
_NAMED = 5
# Pause after a failed repeated push: doubled each time.
FIRST_REST_S = 5.0
_LONGEST_REST_S = 300.0
_REFUSED = 422
_RESTARTED = "the server or one of its replicas was restarted"


@dataclass
class RequestPart:
    """Consecutive requests of a rollout. tried: attempts so far, at all servers."""

    requests: range
    tried: int = 0


class ServerLost(RunError):
    """A server that cannot answer now, also after retries; another one may."""


class Server:
    """A server. One thread may call it while another one reconnects it.

    pusher: None in every process but process 0. Only one thread pushes.
    differences: checked before a lost server is used again.

    epoch: of its process and replicas, when it was used last.
    lost: the reason; None: it is usable.
    problem: the kind of problem that the newest check of a lost server found, or empty.
    """

    dtype: DtypeName = "float32"

    def __init__(
        self,
        client: RolloutClient,
        journal: Journal,
        pusher: WeightPusher | None = None,
        differences: Differences | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self.url = client.base_url
        self.world_size = client.world_size()
        self.epoch: str | None = None
        self.lost: str | None = None
        self.problem = ""
        self._client = client
        self._journal = journal
        self._pusher = pusher
        self._differences = differences
        self._clock = clock
        self._rest_s = self._rests_until = 0.0
        self._losing = threading.Lock()

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()

    # --- answers

    def answer(
        self, call: InferCall, part: RequestPart, given_up: threading.Event
    ) -> list[RolloutEnvelope]:
        """Return one envelope per request of `part`, and count the attempts in it.

        given_up: set when the answer is no longer needed; ends the call and its retries.

        Raises:
            ServerLost: every attempt failed, or the server needs a push; or it was given up.
            RunError, ContractError: what would fail at any server.
        """
        epoch = self.epoch
        retrying = Retrying(
            retry=retry_if_exception(may_pass),
            stop=stop_after_attempt(ATTEMPTS) | stop_when_event_set(given_up),
            wait=_BACKOFF,
            sleep=self._clock.sleep,
            reraise=True,
        )
        try:
            for attempt in retrying:
                with attempt:
                    if given_up.is_set():
                        raise ServerLost("the call was given up")
                    epoch = self.epoch
                    envelopes = self._try(call, part, given_up)
        except SERVER_ERRORS as error:
            if may_pass(error) or needs_push(error) or self._was_restarted(error, epoch):
                reason = f"{error}{_PROXY if may_be_of_a_proxy(error) else ''}"
                if not given_up.is_set():
                    self.lose(reason, epoch)
                raise ServerLost(reason) from error
            if isinstance(error, ProblemError) and error.problem.errors:
                raise ProblemError(_named(error.problem, call)) from error
            raise
        if epoch is not None and {each.coordexp.server_epoch for each in envelopes} != {epoch}:
            self.lose(_RESTARTED, epoch)
        return envelopes

    def _try(
        self, call: InferCall, part: RequestPart, given_up: threading.Event
    ) -> list[RolloutEnvelope]:
        config, first, count = call.request_config, part.requests.start, len(part.requests)
        seed = None if config is None else config.seed
        part.tried += 1
        logged = partial(Call, self.url, first, count, seed, part.tried)
        try:
            envelopes = self._client.infer(call, given_up)
        except SERVER_ERRORS as error:
            self._journal.call(logged(str(error)))
            raise
        self._journal.call(logged(ANSWERED))
        return envelopes

    def _was_restarted(self, error: BaseException, epoch: str | None) -> bool:
        """Return whether other weights come from a restart, not from another learner.

        epoch: of the server when the call began; it may be reconnected by now.
        """
        if not isinstance(error, ProblemError) or error.problem.kind != "other-weights":
            return False
        try:
            return self._client.live().server_epoch != epoch
        except SERVER_ERRORS:
            return True

    def ask(self, call: InferCall) -> list[RolloutEnvelope]:
        """Return the answers to the call of a proof; nothing if it refuses them, or is lost."""
        try:
            return self._client.infer(call)
        except SERVER_ERRORS as error:
            if isinstance(error, ProblemError) and error.problem.status == _REFUSED:
                _LOG.warning("%s refuses the prompts of a proof: none is made. %s", self.url, error)
            else:
                self.lose(str(error))
            return []

    # --- lost and usable again

    def lose(self, reason: str, epoch: str | None = None, problem: str = "") -> None:
        """Mark it as lost, or note why it stays so.

        epoch: when the failed call began; ignored if the server was lost or restarted since.
        """
        with self._losing:
            if epoch is not None and (self.lost is not None or epoch != self.epoch):
                return
            if self.lost is None:
                _LOG.warning("rollout server %s is lost: %s", self.url, reason)
                self._journal.lost(self.url, reason)
            elif self.lost != reason and not problem:
                _LOG.warning("rollout server %s stays lost: %s", self.url, reason)
            self.lost, self.problem = reason, problem
            if self._pusher is not None:
                self._pusher.abandon()

    def _use(self, epoch: str) -> None:
        with self._losing:
            if self.lost is not None:
                _LOG.warning("rollout server %s is back", self.url)
            self.epoch, self.lost, self.problem = epoch, None, ""

    def report(self) -> tuple[str | None, int, str | None]:
        """Return what process 0 knows of it, as `adopt` takes it: values of JSON."""
        return self.epoch, self.world_size, self.lost

    def adopt(self, epoch: str | None, world_size: int, lost: str | None) -> None:
        """Adopt the state in process 0, which has already logged a loss."""
        self.epoch, self.world_size, self.lost = epoch, world_size, lost

    def check(self) -> None:
        """Mark it as lost if it was restarted, or lacks the weights; makes one quick call.

        One that does not answer is left to the calls: after a restart it has another epoch.
        """
        epoch = self.epoch
        try:
            if self._client.health().server_epoch != epoch:
                self.lose(_RESTARTED, epoch)
        except SERVER_ERRORS as error:
            if needs_push(error):
                self.lose(str(error), epoch)

    def restore(self, version: int | None, *, push: bool) -> RunError | None:
        """Use a lost server again if it has the weights `version` (None: any), or gets them.

        push: pushes them, and wakes a server that is asleep. Returns and raises as `push`.
        """
        try:
            missing = self._rejoin(version, wakes=push)
        except RunError as error:
            missing, push = error, False
        if missing is not None and push:
            assert version is not None
            return self.push(version, again=True)
        if missing is not None:
            kind = missing.problem.kind if isinstance(missing, ProblemError) else ""
            self.lose(str(missing), problem=kind)
        return None

    def _rejoin(self, version: int | None, *, wakes: bool) -> RunError | None:
        """Use a lost server again, or return why it lacks the weights `version`.

        A push whose answer was lost is not repeated: the server would refuse it. Raises RunError if
        the server is not there, or differs.
        """
        refusal, info = self._client.check_pushable(), self._client.info()
        if self._differences and (found := list(self._differences(self.url, info))):
            raise RunError("; ".join(map(str, found)))
        self.world_size, missing = info.world_size, self._lacks(version, info)
        if refusal is not None and missing is None:
            if wakes and any(replica.state == "asleep" for replica in info.replicas):
                self._client.wake_up()
            else:
                missing = refusal
        if missing is None:
            self._use(info.server_epoch)
        return missing

    def _lacks(self, version: int | None, info: Info) -> RunError | None:
        held, state = info.weights_version, info.weights_state
        restarted = self._pusher is not None and info.server_epoch != self.epoch
        if version is None or ((state, held) == ("READY", version) and not restarted):
            return None
        found = f"it has weights {held} ({state}), and {version} are not pushed"
        if held > version:  # another learner pushed them
            return RunError(found)
        return ProblemError(Problem.of("push-needed", found, f"GET {self.url}/info/"))

    # --- pushes, in process 0

    def connect(self) -> int:
        """Own the server, and form its weight group; return its weights version."""
        assert self._pusher is not None
        ready = self._pusher.connect()
        self.dtype, self.epoch = ready.dtype, ready.server_epoch
        return ready.weights_version

    def rests(self) -> bool:
        """Return whether a repeated push failed so recently that none is tried yet."""
        return self._clock() < self._rests_until

    def push(self, version: int, *, again: bool = False) -> RunError | None:
        """Make `version` its weights and use it. If that fails, it is lost.

        again: it was lost. After a failure it `rests`, longer every time.

        Returns the error. Raises what would fail again: ContractError where another learner owns
        the server, RunError where the server refused the weights.
        """
        assert self._pusher is not None
        try:
            self.connect()
            report = self._pusher.push(version)
            self.connect()  # the push may have formed the group anew
            if report.status.server_epoch != self.epoch:
                raise RunError(f"{self.url} lost a replica while weights were pushed")
        except RunError as error:
            cause = error.__cause__
            if isinstance(cause, ProblemError) and cause.problem.status == _REFUSED:
                raise
            if again:
                self._rest_s = min(max(FIRST_REST_S, 2 * self._rest_s), _LONGEST_REST_S)
                self._rests_until = self._clock() + self._rest_s
            self.lose(str(error))
            return error
        self._rest_s = self._rests_until = 0.0
        self.adopt_push(report, again)
        return None

    def adopt_push(self, report: SyncReport, again: bool = False) -> None:
        self._journal.push(self.url, again, report)
        self._use(report.status.server_epoch)


def _named(problem: Problem, call: InferCall) -> Problem:
    """Return a refusal with the uuids of the requests that it is about, of `_NAMED` at most."""
    indices = [error.get("index") for error in problem.errors or []]
    samples = [str(one.uuid) for i, one in enumerate(call.infer_requests) if i in indices]
    if not samples:
        return problem
    detail = f"{problem.detail}; of {', '.join(samples[:_NAMED])}"
    return problem.model_copy(update={"detail": detail})
