"""The `server` backend: rollouts from servers reached by URL.

push_weights   the leader pushes to every available server; at least one must take the push
rollout        take back lost servers -> Dispatch over the servers that can be used
stream         the same, chunk by chunk; later chunks are begun before earlier ones are complete
heal           the leader, while it waits for others: pushes again to restarted servers

With several learner processes all of them ask the servers; process 0, the leader, alone pushes, and
the followers adopt its view of every server (SYNC-08).
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_result, wait_exponential

from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.distributed.waiting import waiting_for
from learner.rollout.backend import Journal, PushNeeded, WeightChannel, WeightsVersion
from learner.rollout.client import SERVER_ERRORS, RolloutClient, ServerUnreachable, needs_push
from learner.rollout.dispatch import Dispatch, Job
from learner.rollout.distribution import rank_caps, rank_chunk_size
from learner.rollout.parallel_calls import in_parallel
from learner.rollout.server_handle import Differences, ServerHandle, Sleep, Standing, no_differences
from learner.types import RolloutOutput
from shared_contracts.errors import ContractError, ProblemError, RunError
from shared_contracts.infer import RequestConfig, RolloutEnvelope, RolloutInferRequest
from shared_contracts.server_info import Info
from shared_contracts.weights import MOST_VERSION_STEP, DtypeName

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

# Longer than any engine takes to be built again.
LONGEST_WAIT_S = 1800.0
# After a take-back that failed, before the next one: doubled each time, up to the longest.
FIRST_REST_S = 5.0
_LONGEST_REST_S = 300.0
# At most one part in so many of the time that the leader waits for others goes into looks at
# servers: one that is cut off holds a look up for seconds.
_LOOKS_FRACTION = 6
_REFUSED = 422


class ServerBackend:
    """A backend that spreads rollouts over servers and keeps their order and seeds.

    Once weights were pushed, the servers are asked for answers of these weights and no others. A
    server that is lost is left out. It is looked at before every push and rollout, less and less
    often when it cannot take pushes. When no other is left, see `wait_for_one`.

    clients: one per server, in the order of `servers[]`.
    channels: one per server in process 0, and none in the others.
    decode_batch_size: most sequences decoded at once per rollout GPU (DIST-03).
    journal: gets notes of every call and push. sleep: pauses between attempts.
    differences: between what a server that comes back says of itself and what it must be.
    peers: the learner processes, each with a backend over the same servers.
    gather: called in each of them before a push, where its weights are in pieces; with the type
        of the servers' weights.
    version: of the weights that were pushed last. clock: seconds, measures how long it waits.
    """

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        channels: Sequence[WeightChannel],
        decode_batch_size: int,
        journal: Journal | None = None,
        sleep: Sleep = time.sleep,
        differences: Differences = no_differences,
        peers: Peers = SINGLE_PROCESS,
        gather: Callable[[DtypeName], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.version = WeightsVersion()
        self._dtype: DtypeName = "float32"
        self._gather = gather
        self._journal = journal or Journal()
        self._decode_batch_size = decode_batch_size
        self._timeout_s = max(client.timeout_s for client in clients)
        self._sleep = sleep
        self._clock = clock
        self._peers = peers
        self._dispatches: set[Dispatch] = set()
        self._leads = peers.rank == 0
        self._pushed_to: Sequence[LeaderHandle] = ()
        self._servers: Sequence[ServerHandle]
        if self._leads:
            self._pushed_to = [
                LeaderHandle(client, channel, self._journal, sleep, differences, clock)
                for client, channel in zip(clients, channels, strict=True)
            ]
            self._servers = self._pushed_to
        else:
            self._servers = [
                ServerHandle(client, self._journal, sleep, differences) for client in clients
            ]
        self._busy = threading.Lock()  # pushes are made by one thread at a time
        self._rests_until = 0.0

    def round_size(self) -> int:
        """Return the most requests of this process at once (DIST-04)."""
        sizes = [server.world_size for server in self._servers]
        return rank_chunk_size(self._decode_batch_size, sizes, self._peers.count)

    def close(self) -> None:
        """Give up running requests of all threads, and leave the servers."""
        for dispatch in tuple(self._dispatches):
            dispatch.give_up()
        for server in self._servers:
            server.close()

    # --- pushes

    def connect(self) -> int:
        """Form the weight group with every server; returns their newest weights version.

        Every process calls it. Raises ContractError where no push could follow those of all.
        """
        self.version.newest, self._dtype = self._by_leader(self._connect)
        return self.version.newest

    def push_weights(self, version: int) -> None:
        """Push to all servers at the same time; one that fails is lost.

        Every process calls it, and none returns before all of them have its outcome. When all
        servers fail, they are waited for and pushed to once more.

        Raises:
            RunError: no server took the push; in every process.
        """
        if self._gather is not None:
            self._gather(self._dtype)
        self._peers.all_gather(lambda: None)  # from here on no process asks for the old weights
        self.version.record(self._by_leader(partial(self._push, version)))
        self._peers.all_gather(lambda: None)

    def heal(self) -> None:
        """Find restarted servers, and push again to those that can take it.

        To be called again and again while other processes are waited for, and only while the
        training weights are those that were pushed last; cheap where all is well. Raises only what
        would fail again, as a push that a server refuses.
        """
        if not self._leads or self.version.pushed is None or self._clock() < self._rests_until:
            return
        if not self._busy.acquire(blocking=False):
            return  # another thread heals
        try:
            began = self._clock()
            in_parallel([server.notice for server in self._pushed_to if server.lost is None])
            back = self._back()
            ended = self._clock()
            self._rests_until = ended + _LOOKS_FRACTION * (ended - began)
            _bring(back, self.version.pushed)
        finally:
            self._busy.release()

    def _by_leader(self, work: Callable[[], T]) -> T:
        """Return what `work` returns in process 0; the others adopt its state of the servers."""
        found, standings = broadcast_from_rank0(
            self._peers, lambda: (work(), [server.standing() for server in self._servers])
        )
        if not self._leads:
            for server, standing in zip(self._servers, standings, strict=True):
                server.adopt(Standing(*standing))
        return found

    def _connect(self) -> tuple[int, DtypeName]:
        """The newest version of the servers, and the type of their weights.

        Servers of several types get weights that are gathered in float32, and cast for each.
        """
        versions = in_parallel([server.connect for server in self._pushed_to])
        newest, oldest = max(versions), min(versions)
        if newest - oldest > MOST_VERSION_STEP:  # the others would refuse the next push
            raise ContractError(
                f"POST {self._servers[versions.index(newest)].url}/init_communicator/",
                f"weights_version is {newest}, and another server of the run has {oldest}",
                "Restart that server, or remove it from rollout_matching.vllm.server.servers",
            )
        dtypes = {server.dtype for server in self._pushed_to}
        return newest, dtypes.pop() if len(dtypes) == 1 else "float32"

    def _push(self, version: int) -> int:
        """Push to all servers; if all fail, wait for them and push again."""
        with self._busy:
            for last_attempt in (False, True):
                servers = self._wait_for(self._pushable)
                errors = [error for error in _bring(servers, version) if error is not None]
                if len(errors) < len(servers):
                    break
                if last_attempt:
                    raise errors[0]
            self.version.record(version)
        return version

    def _back(self) -> list["LeaderHandle"]:
        """Return the lost servers that can take a push now."""
        lost = self._to_look_at()
        found = zip(lost, in_parallel([server.look for server in lost]), strict=True)
        return [server for server, pushable in found if pushable]

    def _to_look_at(self) -> list["LeaderHandle"]:
        """Return the lost servers; those that rest only if no other server is left."""
        lost = [server for server in self._pushed_to if server.lost is not None]
        if len(lost) == len(self._pushed_to):
            return lost
        return [server for server in lost if not server.rests()]

    def _pushable(self) -> list["LeaderHandle"]:
        back = self._back()
        return [server for server in self._pushed_to if server.lost is None or server in back]

    # --- rollouts

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Return outputs in the order of the requests. Each process requests its own.

        Raises:
            RunError: no server is left and none came back in time, or a request was refused.
        """
        return self._rolled_out(requests, request_config, self._take_back_lost)

    def stream(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> Generator[list[RolloutOutput], None, None]:
        """Yield the same outputs `round_size` at a time, in order, while later ones are made."""
        return self._streamed(requests, request_config, self._take_back_lost, self.round_size())

    def rollout_asynchronous(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Do the same as `rollout` while the training weights change: push nothing.

        Raises:
            PushNeeded: no server is left that has the weights, and there is one without them.
        """
        return self._rolled_out(requests, request_config, self._rejoin_lost)

    def _rolled_out(
        self,
        requests: Sequence[RolloutInferRequest],
        request_config: RequestConfig,
        look: Callable[[], list[ServerHandle]],
    ) -> list[RolloutOutput]:
        """Run the requests as one chunk."""
        chunks = self._streamed(requests, request_config, look, max(1, len(requests)))
        return [output for chunk in chunks for output in chunk]

    def _streamed(
        self,
        requests: Sequence[RolloutInferRequest],
        request_config: RequestConfig,
        look: Callable[[], list[ServerHandle]],
        size: int,
    ) -> Generator[list[RolloutOutput], None, None]:
        """Run the requests. look: takes back lost servers, and returns those that can be used."""
        dispatch = Dispatch(
            Job(requests, request_config, self.version.pushed),
            self._servers,
            partial(
                rank_caps,
                self._decode_batch_size,
                learner_world_size=self._peers.count,
                rank=self._peers.rank,
            ),
            self._journal,
            look,
            lambda: self._wait_for(look),
            self._timeout_s,
            self._peers.count,
            self._clock,
        )
        self._dispatches.add(dispatch)
        try:
            with closing(dispatch.chunks(size)) as chunks:
                for envelopes in chunks:
                    self._journal.healthy = len(self._askable())
                    yield [_output(envelope) for envelope in envelopes]
        finally:
            self._dispatches.discard(dispatch)

    def _askable(self) -> list[ServerHandle]:
        return [server for server in self._servers if server.lost is None]

    def _take_back_lost(self) -> list[ServerHandle]:
        """Push to lost servers (leader, SYNC-07), or check whether they are back (follower)."""
        if self._leads:
            with self._busy:
                _bring(self._back(), self.version.pushed)
        else:
            self._rejoin([server for server in self._servers if server.lost is not None])
        return self._askable()

    def _rejoin_lost(self) -> list[ServerHandle]:
        if self._leads:
            with self._busy:
                self._rejoin(self._to_look_at())
        else:
            self._take_back_lost()
        askable = self._askable()
        if not askable and any(server.wants_push for server in self._servers):
            reasons = "; ".join(f"{server.url}: {server.lost}" for server in self._servers)
            raise PushNeeded(f"no rollout server has the weights any more ({reasons})")
        return askable

    def _rejoin(self, lost: Sequence[ServerHandle]) -> None:
        in_parallel([partial(server.rejoin, self.version.pushed) for server in lost])

    def _wait_for(self, look: Callable[[], list[T]]) -> list[T]:
        return wait_for_one(look, self._servers, self._timeout_s, self._sleep, self._clock)


def _output(envelope: RolloutEnvelope) -> RolloutOutput:
    choice = envelope.response.choices[0]
    stamp = envelope.coordexp
    assert envelope.response.prompt_token_ids is not None
    assert choice.token_ids is not None
    return RolloutOutput(
        prompt_token_ids=envelope.response.prompt_token_ids,
        response_token_ids=choice.token_ids,
        text=choice.message.content,
        finish_reason=choice.finish_reason,
        repeat_terminated=choice.index in stamp.repeat_terminated_choices,
        weights_version=stamp.weights_version,
        seed=stamp.seed,
        logprobs=None
        if choice.logprobs is None
        else [each.logprob for each in choice.logprobs.content],
    )


class LeaderHandle(ServerHandle):
    """A server with its weight channel. Only one thread at a time can push to it.

    dtype: of its weights, when it was connected to.
    """

    dtype: DtypeName = "float32"

    def __init__(
        self,
        client: RolloutClient,
        channel: WeightChannel,
        journal: Journal,
        sleep: Sleep = time.sleep,
        differences: Differences = no_differences,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(client, journal, sleep, differences)
        self._channel = channel
        self._clock = clock
        self._taken: int | None = None  # the version it has, unless something happened to it
        self._rest_s = self._rests_until = 0.0

    def connect(self) -> int:
        """Form the weight group; returns the server's weights version."""
        ready = self._channel.connect()
        self.dtype = ready.dtype
        self._epoch, self.world_size = ready.server_epoch, ready.world_size - 1
        return ready.weights_version

    def bring_to(self, version: int | None) -> RunError | None:
        """Make `version` its weights. If that fails, the server is lost; returns the error.

        Raises what would fail again, and ContractError where another learner has it by now.
        """
        try:
            if self.lost is None and version is not None:
                self._push(version)
            else:
                self.take_back(version)
        except RunError as error:
            if _is_final(error):
                raise
            self.lose(str(error))
            return error
        return None

    def take_back(self, version: int | None) -> None:
        """Use it again, once it has the weights `version`; None: any weights.

        A push whose answer was lost is not made twice, which the server would refuse.
        Raises what a push raises, SERVER_ERRORS, and RunError for a server that differs.
        After a failure it `rests`, longer every time.
        """
        try:
            self._bring_back(version)
        except RunError as error:
            self._rest_s = min(max(FIRST_REST_S, 2 * self._rest_s), _LONGEST_REST_S)
            self._rests_until = self._clock() + self._rest_s
            if self.lost != str(error):
                _LOG.warning("rollout server %s stays lost: %s", self.url, error)
            raise
        self._rest_s = self._rests_until = 0.0
        self._is_back()
        _LOG.warning("rollout server %s is back", self.url)

    def rejoin(self, version: int | None) -> None:
        """Use it again if it has `version`, unless a push is known to have failed."""
        if version in (None, self._taken):
            super().rejoin(version)
        elif self.look():
            self.wants_push = True

    def lose(self, reason: str, returns: int | None = None) -> bool:
        if lost := super().lose(reason, returns):
            self._channel.abandon()
        return lost

    def notice(self) -> None:
        """Lose it if it was restarted or lacks the weights; makes one quick call.

        One that does not answer is left to those who ask it: when it is there again it is
        another epoch.
        """
        returns = self.returns
        try:
            epoch = self._client.health().server_epoch
        except SERVER_ERRORS as error:
            if needs_push(error):
                self.lose(str(error), returns)
            return
        if epoch != self._epoch:
            self.lose("the server or one of its replicas was restarted", returns)

    def look(self) -> bool:
        """Return whether a lost server can take a push now; makes one quick call."""
        try:
            self._client.check_pushable()
        except SERVER_ERRORS as error:
            self.stays_lost(error)
            return False
        self.starting = self.wants_push = False
        return True

    def rests(self) -> bool:
        """Return whether it failed so recently that it is not tried again yet."""
        return self._clock() < self._rests_until

    def close(self) -> None:
        self._channel.close()
        super().close()

    def _push(self, version: int, again: bool = False) -> None:
        """Make `version` the server's weights; it can be used from then on.

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
        self._is_back()

    def _bring_back(self, version: int | None) -> None:
        info = self._client.info()
        if found := self._differences(self.url, info):
            raise RunError("; ".join(map(str, found)))
        if version is not None and not self._holds(version, info):
            self._push(version, again=True)
        elif self._epoch is not None:
            self._epoch, self.world_size = info.server_epoch, info.world_size

    def _holds(self, version: int, info: Info) -> bool:
        """Return whether it got this version, and nothing was restarted since.

        What it says of itself is believed only where no push is known to have failed.
        """
        held = (info.server_epoch, info.weights_state, info.weights_version)
        return self._taken == version and held == (self._epoch, "READY", version)


def _answer_was_lost(error: RunError) -> bool:
    """Return whether a push broke although the server may have taken it."""
    return isinstance(error.__cause__, (ServerUnreachable, TimeoutError))


def _is_final(error: RunError) -> bool:
    """Return whether the server refused the weights."""
    cause = error.__cause__
    return isinstance(cause, ProblemError) and cause.problem.status == _REFUSED


def _bring(servers: Sequence[LeaderHandle], version: int | None) -> list[RunError | None]:
    return in_parallel([partial(server.bring_to, version) for server in servers])


class Awaited(Protocol):
    """A server that is waited for. lost: why it cannot be used now.

    starting: its engines start. wants_push: it only needs a push.
    """

    url: str
    lost: str | None
    starting: bool
    wants_push: bool


def wait_for_one(
    look: Callable[[], list[T]],
    awaited: Sequence[Awaited],
    silence_s: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[T]:
    """Call `look` until it returns a server.

    Raises:
        RunError: no server was starting or needed only a push for `silence_s`, or none came back
            within LONGEST_WAIT_S.
    """
    began = heard = clock()
    over = ""

    def is_over(_: RetryCallState) -> bool:
        nonlocal heard, over
        now = clock()
        if any(one.starting or one.wants_push for one in awaited):
            heard = now
        if now - began > LONGEST_WAIT_S:
            over = f"waited {LONGEST_WAIT_S:.0f} s for one to come back, the longest wait"
        elif now - heard > silence_s:
            over = (
                f"waited {silence_s:.0f} s (rollout_matching.vllm.server.timeout_s) for one "
                "to come back or to start"
            )
        return over != ""

    def reasons() -> str:
        return "; ".join(f"{one.url}: {one.lost}" for one in awaited)

    def nobody(_: RetryCallState) -> list[T]:
        raise RunError(f"no rollout server can take a push and answer; {over}. {reasons()}")

    retry = Retrying(
        retry=retry_if_result(lambda found: not found),
        stop=is_over,
        wait=wait_exponential(multiplier=0.1, max=2.0),
        sleep=sleep,
        retry_error_callback=nobody,
    )
    with waiting_for("a rollout server to come back", reasons):
        return retry(look)
