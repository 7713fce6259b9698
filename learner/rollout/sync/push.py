"""One push of weights to one server, phase by phase.

    reach       GET  /get_world_size/
    rendezvous  POST /init_communicator/     |  join the group as rank 0
    start       POST /start_weight_update/      manifest; the server pauses, drains, checks
    transfer    POST /update_weights/        |  broadcast bucket after bucket, digest
    finish      POST /finish_weight_update/     digests; the server verifies, resets, resumes

Calls beside a bar run at the same time. Every phase has a deadline; a broken phase is
reported with side, address, phase and parameters, and the group is let go of: the next push
forms it anew, unless another learner has come to the server meanwhile (SYNC-07).
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from learner.rollout.client import SERVER_ERRORS, RolloutClient, ServerUnreachable
from learner.rollout.exclusive_lease import Heartbeat, require_exclusive_lease
from learner.rollout.parallel_calls import run_together, run_within
from learner.rollout.sync.transports import CurrentGpu, WeightGroup, join_group, new_nccl_id
from learner.rollout.sync.weights import (
    Outgoing,
    SourceChoice,
    WeightSource,
    digests_of,
    verified_columns,
)
from shared_contracts.cli import printable
from shared_contracts.errors import ContractError, ProblemError, RunError
from shared_contracts.rollout_config import Verify
from shared_contracts.weights import (
    AdapterBase,
    CommunicatorReady,
    DtypeName,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterDigest,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    Transport,
    UpdateWeights,
)

_LOG = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Phase = Literal["reach", "rendezvous", "start", "transfer", "finish", "verify"]
Side = Literal["learner", "server"]
Join = Callable[[InitCommunicator, threading.Event], WeightGroup]

# Problems whose `errors` are about one parameter each.
_NAMES_PARAMETERS = ("manifest-mismatch", "weights-differ")
# Parameters that a message names, and that an error has; characters of a name that a server sent.
_MOST_NAMED, _MOST_KEPT = 5, 32
_NAME_CHARACTERS = 200
# The server bounds its part of every phase itself; so much longer it has to say what broke.
_ANSWER_MARGIN_S = 60.0
# To tell a server that the group is left; it finds out by itself, too.
_FAREWELL_S = 10.0
_CLOSED = "the learner has left this server"


@dataclass(frozen=True)
class PhaseTimeouts:
    """Seconds after which a phase is given up.

    server: within which the server gives up its part of a phase, and gloo a collective.
    """

    server: float
    reach: float
    rendezvous: float
    start: float
    transfer: float
    finish: float

    @classmethod
    def of(cls, timeout_s: float) -> "PhaseTimeouts":
        """All phases alike: the server has `timeout_s`, and the learner hears why it failed."""
        longer = timeout_s + _ANSWER_MARGIN_S
        return cls(timeout_s, timeout_s, longer, longer, longer, longer)

    def of_phase(self, phase: Phase) -> float:
        seconds: float = getattr(self, "finish" if phase == "verify" else phase)
        return seconds


class WeightSyncError(RunError):
    """A push broke; unless it was refused at its start, the server needs a full push now.

    parameters: the first of those it is about; with `transfer` the last that was on its way.
    """

    def __init__(
        self,
        side: Side,
        address: str,
        phase: Phase,
        reason: object,
        parameters: Sequence[str] = (),
    ) -> None:
        text = str(reason) or type(reason).__name__
        about = f" at {_listed(parameters)}" if parameters else ""
        super().__init__(
            f"weight sync failed at the {side} ({address}) in phase {phase}{about}: {text}"
        )
        self.side = side
        self.address = address
        self.phase = phase
        self.parameters = tuple(parameters[:_MOST_KEPT])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    named = ", ".join(names[:_MOST_NAMED])
    return f"{named} and {more} more" if more > 0 else named


def _shown(name: object) -> str:
    return printable(name, most=_NAME_CHARACTERS)


def _is_lost_at_start(error: Exception) -> bool:
    """Whether a push met a server that is gone, or has no group or that of another learner."""
    if not isinstance(error, WeightSyncError) or error.phase != "start":
        return False
    cause = error.__cause__
    if isinstance(cause, ProblemError):
        return cause.problem.kind == "weight-update-order"
    return isinstance(cause, (ServerUnreachable, TimeoutError))


@dataclass
class _Joined:
    """The weight group, while there is one; the server knows it by its attempt.

    base_checked: the server has said that it holds the base of the adapter.
    heartbeat: from before the group has formed.
    """

    group: WeightGroup
    ready: CommunicatorReady
    attempt: str
    heartbeat: Heartbeat
    base_checked: bool = False


class WeightPusher:
    """Holds rank 0 of one server's weight group and pushes through it.

    Pushes are made one at a time; `abandon` may come from another thread in the middle of one.

    group_port: port of the rendezvous. verify: which parameters the server compares.
    timeouts: by default those of the client's `timeout_s`. join: how the group is joined. gpu: the
    one that sends, by default that of the thread which makes the pusher.
    """

    def __init__(
        self,
        client: RolloutClient,
        group_port: int,
        choice: SourceChoice,
        transport: Transport,
        bucket_bytes: int,
        verify: Verify,
        timeouts: PhaseTimeouts | None = None,
        join: Join = join_group,
        gpu: CurrentGpu | None = None,
    ) -> None:
        self._client = client
        self._port = group_port
        self._choice = choice
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._verify = verify
        self._timeouts = timeouts or PhaseTimeouts.of(client.timeout_s)
        self._join_group = join
        self._gpu = gpu or CurrentGpu()
        self._joined: _Joined | None = None
        self._former: str | None = None  # the attempt of the group that was left last
        self._leaving = threading.Lock()
        self._closed = False

    def connect(self, only_if_free: bool = False) -> CommunicatorReady:
        """Form the weight group, once.

        only_if_free: a server where a group stands refuses; otherwise it leaves that one. Whether
            its learner lives is looked at only when a group is formed anew: the first time
            it is for the caller to do, for all servers at once.

        Raises:
            WeightSyncError: the server refused or a side did not join in time.
            ContractError: another learner has come to the server meanwhile.
        """
        return self._join(only_if_free).ready

    def push(self, version: int) -> SyncReport:
        """Make `version` the server's weights.

        A server that is lost before anything is sent says nothing about what is pushed: that
        is a failure of the push, and not of its source.

        Raises:
            WeightSyncError: names the phase that broke; the group is let go of.
            ContractError: as `connect` does.
        """
        while True:
            joined, source = self._join(), self._choice.current()
            try:
                return self._push(joined, source, version)
            except Exception as error:
                if _is_lost_at_start(error) or self._closed:
                    raise
                if not self._choice.failed(source, error):
                    raise

    def try_out(self) -> SyncReport:
        """Send what the server should hold already; its workers compare it and load nothing.

        The source yields what is sent, and its base says what all weights are.

        Raises:
            WeightSyncError: the server holds something else, or a phase broke; its weights and
                version are what they were.
        """
        joined = self._join(only_if_free=True)
        version = joined.ready.weights_version
        try:
            return self._push(joined, self._choice.current(), version, trial=True)
        except BaseException:
            self._say_farewell(joined.attempt)
            raise

    def abandon(self) -> None:
        """Let go of the group of a server that was lost; the next push forms it anew."""
        if joined := self._leave():
            joined.group.abandon()

    def close(self) -> None:
        """Leave the group for good and tell the server; a server that is gone is no error.

        A push that still runs breaks, and forms no other group.
        """
        with self._leaving:
            self._closed = True
        if joined := self._leave():
            joined.group.close()
            self._say_farewell(joined.attempt)

    def _say_farewell(self, attempt: str) -> None:
        """The server leaves the group, and no other that stands by now."""
        with suppress(TimeoutError, ContractError, *SERVER_ERRORS):
            run_within(lambda: self._client.close_communicator(attempt), _FAREWELL_S)

    def _leave(self) -> _Joined | None:
        with self._leaving:
            joined, self._joined = self._joined, None
            if joined is not None:
                self._former = joined.attempt
        if joined is not None:
            joined.heartbeat.stop()
        return joined

    def _join(self, only_if_free: bool = False) -> _Joined:
        if self._joined is not None:
            return self._joined
        if self._closed:
            raise self._broken("learner", "reach", ConnectionAbortedError(_CLOSED))
        host = urlsplit(self._client.base_url).hostname
        assert host is not None, f"{self._client.base_url} was validated with the config"
        body = InitCommunicator(
            host=self._phase("reach", partial(socket.gethostbyname, host)),
            port=self._port,
            attempt=uuid4().hex,
            if_none=only_if_free,
            world_size=1 + self._phase("reach", self._client.world_size),
            transport=self._transport,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeouts.server,
            nccl_unique_id=new_nccl_id() if self._transport == "nccl" else None,
        )
        if self._former is not None:
            self._say_farewell(self._former)
            self._phase("reach", lambda: require_exclusive_lease([self._client]))
        ready: list[CommunicatorReady] = []
        group: list[WeightGroup] = []
        given_up = threading.Event()
        heartbeat = Heartbeat(partial(self._client.keep_communicator, body.attempt))
        try:
            self._together(
                "rendezvous",
                lambda: ready.append(self._client.init_communicator(body)),
                lambda: group.append(self._join_group(body, given_up)),
            )
        except BaseException:
            heartbeat.stop()
            if only_if_free:  # no next try will make the server leave what it may have formed
                self._say_farewell(body.attempt)
            raise
        finally:
            given_up.set()
        return self._keep(_Joined(group[0], ready[0], body.attempt, heartbeat))

    def _keep(self, joined: _Joined) -> _Joined:
        """The group just formed, unless the pusher was closed meanwhile."""
        with self._leaving:
            if not self._closed:
                self._joined = joined
                return joined
        joined.heartbeat.stop()
        joined.group.abandon()
        raise self._broken("learner", "rendezvous", ConnectionAbortedError(_CLOSED))

    def _push(
        self, joined: _Joined, source: WeightSource, version: int, trial: bool = False
    ) -> SyncReport:
        """One try; an error or an interrupt of any kind leaves no group behind."""
        dtype = joined.ready.dtype
        began = time.monotonic()
        try:
            parameters = source.metadata(dtype)
            manifest = StartWeightUpdate(
                version=version,
                parameters=parameters,
                adapter=source.adapter,
                base=None if joined.base_checked else self._base(source, dtype, version),
                trial=trial,
                attempt=joined.attempt,
            )
            self._phase(
                "start",
                lambda: self._client.start_weight_update(manifest),
                [] if manifest.base is None else manifest.base.digests,
            )
            joined.base_checked |= manifest.base is not None and not trial
            started = time.monotonic()
            digests = self._transfer(joined, source, parameters, version)
            sent = time.monotonic()
            report = self._finish(manifest, digests)
        except BaseException:
            self.abandon()
            raise
        report.seconds |= {
            "start": started - began,
            "send": sent - started,
            "finish": time.monotonic() - sent,
            "total": time.monotonic() - began,
        }
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in report.seconds.items())
        _LOG.info(
            "weights %d are at %s: %d bytes, %.2f GB/s, %d parameters verified (%s)",
            version,
            self._client.base_url,
            report.bytes,
            report.bytes / report.seconds["send"] / 1e9,
            report.verified,
            phases,
        )
        return report

    def _base(self, source: WeightSource, dtype: DtypeName, version: int) -> AdapterBase | None:
        """The base of an adapter, for the server to compare; None where it is not verified."""
        if source.base is None or self._verify == "off":
            return None
        parameters = source.base.metadata(dtype)
        columns = verified_columns(self._verify, parameters, version)
        digests = digests_of(source.base.tensors(dtype), columns)
        return AdapterBase(parameters=parameters, digests=digests)

    def _transfer(
        self,
        joined: _Joined,
        source: WeightSource,
        parameters: list[ParameterMeta],
        version: int,
    ) -> list[ParameterDigest]:
        columns = verified_columns(self._verify, parameters, version)
        outgoing = Outgoing(source.tensors(joined.ready.dtype), columns)
        body = UpdateWeights(version=version, attempt=joined.attempt)
        self._together(
            "transfer",
            lambda: self._client.update_weights(body),
            lambda: joined.group.send(parameters, outgoing),
            lambda: outgoing.newest,
        )
        return outgoing.digests()

    def _finish(self, sent: StartWeightUpdate, digests: list[ParameterDigest]) -> SyncReport:
        body = FinishWeightUpdate(version=sent.version, digests=digests, attempt=sent.attempt)
        report = self._phase("finish", lambda: self._client.finish_weight_update(body), digests)
        size, found = sum(parameter.num_bytes for parameter in sent.parameters), ""
        if report.verified != len(digests):
            found = f"it compared {report.verified} of {len(digests)} parameters"
        elif report.bytes != size:
            found = f"it says that {report.bytes} bytes came, and {size} were sent"
        elif report.trial != sent.trial:
            found = f"it says trial {report.trial}, and {sent.trial} was asked for"
        if found:
            raise WeightSyncError("server", self._client.base_url, "verify", found)
        return report

    # --- phases

    def _phase(
        self, phase: Phase, call: Callable[[], Answer], compared: Sequence[ParameterDigest] = ()
    ) -> Answer:
        """compared: what the call has the server compare, and so all that it may say differs."""
        try:
            return run_within(call, self._timeouts.of_phase(phase))
        except ProblemError as error:
            asked = {_shown(digest.name) for digest in compared}
            raise self._refused(phase, error, asked) from error
        except (TimeoutError, *SERVER_ERRORS) as error:
            raise self._broken("server", phase, error) from error
        except OSError as error:
            raise self._broken("learner", phase, error) from error

    def _together(
        self,
        phase: Phase,
        call: Callable[[], object],
        collective: Callable[[], object],
        newest: Callable[[], str | None] = lambda: None,
    ) -> None:
        broken = run_together(call, self._gpu.used_by(collective), self._timeouts.of_phase(phase))
        if broken is None:
            return
        if isinstance(broken.error, ContractError):
            raise broken.error
        side: Side = "server" if broken.part == "call" else "learner"
        raise self._broken(side, phase, broken.error, newest()) from broken.error

    def _broken(
        self, side: Side, phase: Phase, reason: BaseException, newest: str | None = None
    ) -> WeightSyncError:
        parameters = [] if newest is None else [newest]
        return WeightSyncError(side, self._client.base_url, phase, reason, parameters)

    def _refused(self, phase: Phase, error: ProblemError, compared: set[str]) -> WeightSyncError:
        """A fault of a manifest may name what it lacks; what differs must have been compared."""
        kind, reason = error.problem.kind, str(error)
        if kind not in _NAMES_PARAMETERS:
            return self._broken("server", phase, error)
        faults = error.problem.errors or []
        named = list(dict.fromkeys(_shown(each["where"]) for each in faults if "where" in each))
        foreign: list[str] = []
        if kind == "weights-differ":
            foreign = [name for name in named if name not in compared]
            named = [name for name in named if name in compared]
        if foreign:
            reason += f"; it names parameters that it did not have to compare: {_listed(foreign)}"
        phase = "verify" if phase == "finish" else phase
        return WeightSyncError("server", self._client.base_url, phase, reason, named)
