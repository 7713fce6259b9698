"""The learner's part of a push to one server, phase by phase (SYNC-04, SYNC-05).

    reach       GET  /get_world_size/
    rendezvous  POST /init_communicator/     |  join the group as rank 0       (once)
    start       POST /start_weight_update/      manifest; the server drains and pauses
    transfer    POST /update_weights/        |  send bucket after bucket
    finish      POST /finish_weight_update/     the server resets its caches and resumes
    adapter     POST /load_adapter/             instead of the three before: a LoRA adapter

The phases have the names and the order of `rollout_server.weights.pushes`. Calls beside a bar run
at the same time. Each phase has a deadline. A phase that breaks is reported with side, address and
phase; the next push forms the group anew.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import partial
from typing import Literal, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from torch import Tensor

from learner.rollout.client import SERVER_ERRORS, RolloutClient, ServerUnreachable
from learner.rollout.parallel_calls import in_thread
from learner.rollout.sync.group import CurrentGpu, Sender, join_group
from learner.rollout.sync.weights import AdapterWeights, SyncMode
from shared_contracts.errors import ContractError, ProblemError, RunError
from shared_contracts.weights import (
    CommunicatorReady,
    GroupCall,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    Transport,
)

_LOG = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Phase = Literal["reach", "rendezvous", "start", "transfer", "finish", "adapter"]
Side = Literal["learner", "server"]
Join = Callable[[InitCommunicator, threading.Event], Sender]

# Added to the deadline of a phase, so that the server can answer with its own reason.
_ANSWER_MARGIN_S = 60.0
# The same after the learner's part has failed: the server knows the reason.
REASON_GRACE_S = 3.0
_CLOSED = "the learner has left this server"
_ABANDONED = "the learner has left the group"
_NO_GROUP = "rollout_matching.vllm.mode: colocate and rollout_backend: hf need no network group"


class WeightSyncError(RunError):
    """A push broke. Unless it was refused at its start, the server needs a full push now."""

    def __init__(self, side: Side, address: str, phase: Phase, reason: object) -> None:
        text = str(reason) or type(reason).__name__
        advice = f". {_NO_GROUP}" if phase == "rendezvous" else ""
        super().__init__(
            f"weight sync failed at the {side} ({address}) in phase {phase}: {text}{advice}"
        )
        self.side = side
        self.phase = phase


class WeightPusher:
    """Holds rank 0 of one server's weight group, and pushes through it.

    Pushes are made one at a time; another thread may call `abandon` or `close` in the middle of
    one.

    Weights are sent from the current GPU of the thread that makes the pusher.

    group_port: port of the rendezvous. join: how the group is joined.

    senders: number of learner processes in the group; 0: there is no group.
    """

    def __init__(
        self,
        client: RolloutClient,
        group_port: int,
        mode: SyncMode,
        transport: Transport,
        bucket_bytes: int,
        join: Join = join_group,
    ) -> None:
        self._client = client
        self._port = group_port
        self._mode = mode
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._timeout_s = client.timeout_s
        self._join_group = join
        self._gpu = CurrentGpu()
        self._ready: CommunicatorReady | None = None
        self._group: Sender | None = None
        self._attempt = ""  # of the newest group, also after it was abandoned; empty without one
        self.senders = 0
        self._leaving = threading.Lock()
        self._closed = False

    # --- the group

    def connect(self) -> CommunicatorReady:
        """Form the weight group, once.

        Raises:
            WeightSyncError: the server refused, or a side did not join in time.
            ContractError: another learner owns the server now.
        """
        if self._ready is None or self.senders != 1:
            self.form_group(self.new_group(1, self._transport))
        assert self._ready is not None
        return self._ready

    def new_group(self, senders: int, transport: Transport) -> InitCommunicator:
        """Return the call that forms a group with `senders` learner processes."""
        if self._closed:
            raise self._broken("learner", "reach", ConnectionAbortedError(_CLOSED))
        self.abandon()
        host = urlsplit(self._client.base_url).hostname
        assert host is not None, f"{self._client.base_url} was validated with the config"
        return InitCommunicator(
            host=self._phase("reach", partial(socket.gethostbyname, host)),
            port=self._port,
            world_size=senders + self._phase("reach", self._client.world_size),
            senders=senders,
            attempt=uuid4().hex,
            learner=f"the learner on {socket.gethostname()} (process {os.getpid()})",
            replaces=self._attempt or None,
            transport=transport,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
        )

    def form_group(self, init: InitCommunicator) -> None:
        """Form a new group; raises as `connect`."""
        given_up, ready, group = threading.Event(), list[CommunicatorReady](), list[Sender]()
        try:
            self._together(
                "rendezvous",
                lambda: ready.append(self._client.init_communicator(init)),
                lambda: group.append(self._join_group(init, given_up)),
            )
        finally:
            given_up.set()
        with self._leaving:
            if not self._closed:
                self._ready, self._group, self._attempt = ready[0], group[0], init.attempt
                self.senders = init.senders
                return
        group[0].abandon()
        raise self._broken("learner", "rendezvous", ConnectionAbortedError(_CLOSED))

    def abandon(self) -> None:
        """Leave the group of a lost server; the next push forms it anew."""
        with self._leaving:
            group, self._group, self._ready, self.senders = self._group, None, None, 0
        if group is not None:
            group.abandon()

    def close(self) -> None:
        """Leave the group for good and tell the server. A push that runs breaks."""
        with self._leaving:
            self._closed = True
        had_group = self._group is not None
        self.abandon()
        if had_group:
            with suppress(ContractError, *SERVER_ERRORS):
                self._client.close_communicator(GroupCall(attempt=self._attempt))

    # --- a push

    def push(self, version: int) -> SyncReport:
        """Make `version` the server's weights; `seconds` of the report also has the `total`.

        If the server is lost before anything is sent, the mode does not count it as a failure.

        Raises:
            WeightSyncError: names the phase that broke; the group is left.
            ContractError: another learner owns the server now.
        """
        while True:
            ready, adapter = self.connect(), self._mode.adapter
            began = time.monotonic()
            try:
                if adapter is None:
                    report = self._push_full(version, ready)
                else:
                    report = self._push_adapter(version, adapter, ready)
            except Exception as error:
                self.abandon()
                ends = isinstance(error, ContractError) or _is_lost_at_start(error)
                if adapter is None or ends or self._closed:
                    raise
                self._mode.adapter_failed(error)
                continue
            report.seconds["total"] = time.monotonic() - began
            self._log(version, report)
            return report

    def _push_full(self, version: int, ready: CommunicatorReady) -> SyncReport:
        parameters = self._mode.full.metadata(ready.dtype)
        self.start(version, parameters)
        self.transfer(parameters, self._mode.full.tensors(ready.dtype))
        return self.finish()

    def start(self, version: int, parameters: list[ParameterMeta]) -> None:
        """Send the manifest; the server drains and pauses."""
        body = StartWeightUpdate(attempt=self._attempt, version=version, parameters=parameters)
        self._phase("start", lambda: self._client.start_weight_update(body))

    def transfer(
        self, parameters: list[ParameterMeta], weights: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Send the weights while the server receives and loads them."""
        call, group = GroupCall(attempt=self._attempt), self._group
        if group is None:  # another thread has abandoned it
            raise self._broken("learner", "transfer", ConnectionAbortedError(_ABANDONED))
        self._together(
            "transfer",
            lambda: self._client.update_weights(call),
            lambda: group.send(parameters, weights),
        )

    def finish(self) -> SyncReport:
        """Have the server answer with the new weights."""
        call = GroupCall(attempt=self._attempt)
        return self._phase("finish", lambda: self._client.finish_weight_update(call))

    def _push_adapter(
        self, version: int, adapter: AdapterWeights, ready: CommunicatorReady
    ) -> SyncReport:
        content = adapter.safetensors(ready.dtype)
        call = partial(self._client.load_adapter, version, self._attempt, content)
        return self._phase("adapter", call)

    def _log(self, version: int, report: SyncReport) -> None:
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in report.seconds.items())
        rate = report.bytes / max(report.seconds["transfer"], 1e-9) / 1e9
        url = self._client.base_url
        _LOG.info("weights %d are at %s: %.2f GB/s (%s)", version, url, rate, phases)

    # --- one phase

    def _phase(self, phase: Phase, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except SERVER_ERRORS as error:
            raise self._broken("server", phase, error) from error
        except OSError as error:
            raise self._broken("learner", phase, error) from error

    def _together(
        self, phase: Phase, call: Callable[[], object], collective: Callable[[], object]
    ) -> None:
        """Run a call of the server and the learner's part of a collective at the same time.

        A thread in a collective cannot be ended: it is left behind when the phase breaks.
        """
        limit_s = self._timeout_s + _ANSWER_MARGIN_S
        called, collected = in_thread(call), in_thread(self._gpu.used_by(collective))
        wait([called, collected], limit_s, FIRST_EXCEPTION)
        if collected.done() and collected.exception() is not None:
            wait([called], REASON_GRACE_S)
        sides: list[tuple[Side, Future[object]]] = [("server", called), ("learner", collected)]
        late = TimeoutError(f"no end within {limit_s:g} s")
        failed = [(side, part.exception()) for side, part in sides if part.done()]
        failed += [(side, late) for side, part in sides if not part.done()]
        for side, error in failed:
            if error is not None:
                raise self._broken(side, phase, error) from error

    def _broken(self, side: Side, phase: Phase, reason: BaseException) -> RunError | ContractError:
        """Return the error of a phase; a ContractError if another learner owns the server."""
        url = self._client.base_url
        if isinstance(reason, ContractError):
            return reason
        if isinstance(reason, ProblemError) and reason.problem.kind == "taken-over":
            return ContractError(
                url,
                reason.problem.detail,
                "Let one learner push to a server: stop the other one, or name other servers in "
                "rollout_matching.vllm.server.servers",
            )
        return WeightSyncError(side, url, phase, reason)


def _is_lost_at_start(error: Exception) -> bool:
    """Return whether a push met a server that is gone, or that has no group of this learner."""
    if not isinstance(error, WeightSyncError) or error.phase not in ("start", "adapter"):
        return False
    cause = error.__cause__
    if isinstance(cause, ProblemError):
        return cause.problem.kind in ("weight-update-order", "not-ready")
    return isinstance(cause, ServerUnreachable)
