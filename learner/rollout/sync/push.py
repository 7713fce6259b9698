"""The learner's part of a push to one server, phase by phase (SYNC-04, SYNC-05).

    connect                  GET  /get_world_size/
      init_communicator      POST /init_communicator/     |  join the group as rank 0       (once)
    push
      start_weight_update    POST /start_weight_update/      manifest; the server drains and pauses
      update_weights         POST /update_weights/        |  send bucket after bucket
      finish_weight_update   POST /finish_weight_update/     the server resets its caches, resumes
      load_adapter           POST /load_adapter/             instead of these three, and without a
                                                             group: a LoRA adapter
    close                    POST /close_communicator/

The methods have the names of their routes, and of the methods of `rollout_server.weights.pushes`.
Calls beside a bar run at the same time. Each phase has a deadline. A phase that breaks is reported
with side, address and phase; the next push forms the group anew.

`push_together` does the same to a colocated server (ROLL-03): process 0 makes the calls, and every
process sends to the workers on its own GPU.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from torch import Tensor

from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.rollout.client import SERVER_ERRORS, RolloutClient, ServerUnreachable
from learner.rollout.parallel_calls import in_thread
from learner.rollout.sync.group import Sender, join_group
from learner.rollout.sync.weights import SyncMode
from shared_contracts.errors import ContractError, ProblemError, RunError
from shared_contracts.weights import (
    CommunicatorReady,
    DtypeName,
    GroupCall,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    Transport,
)

Answer = TypeVar("Answer")
T = TypeVar("T")
Phase = Literal["reach", "rendezvous", "start", "transfer", "finish", "adapter"]
Side = Literal["learner", "server"]
Join = Callable[[InitCommunicator, threading.Event, int], Sender]

# Added to the deadline of a phase, so that the server can answer with its own reason.
_ANSWER_MARGIN_S = 60.0
# The same after the learner's part has failed: the server knows the reason.
REASON_GRACE_S = 3.0
_ABANDONED = "the learner has left the group"
_NO_GROUP = "rollout_matching.vllm.mode: colocate and rollout_backend: hf need no network group"


class WeightSyncError(RunError):
    """A push broke. Unless it was refused at its start, the server needs a full push now."""

    def __init__(
        self, side: Side, address: str, phase: Phase, reason: object, advice: str = ""
    ) -> None:
        text = str(reason) or type(reason).__name__
        super().__init__(
            f"weight sync failed at the {side} ({address}) in phase {phase}: {text}{advice}"
        )
        self.side = side
        self.phase = phase


class WeightPusher:
    """Owns one server, with rank 0 of its weight group, and pushes to it.

    Pushes are made one at a time; another thread may call `abandon` or `close` in the middle of
    one. Weights are sent from the GPU that is current in the thread that pushes.

    group_port: port of the rendezvous. peers: the processes that `push_together`; each has a
    pusher, and that of process 0 owns the server. transport: of a push by all of them; process 0
    alone uses gloo, as it cannot share the memory of its GPU with the workers on other ones.
    join: how a group is joined.

    senders: number of learner processes in the group; 0: there is no group.
    """

    def __init__(
        self,
        client: RolloutClient,
        group_port: int,
        mode: SyncMode,
        transport: Transport,
        bucket_bytes: int,
        peers: Peers = SINGLE_PROCESS,
        join: Join = join_group,
    ) -> None:
        self.senders = 0
        self._peers = peers
        self._client = client
        self._port = group_port
        self._mode = mode
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._timeout_s = client.timeout_s
        self._join_group = join
        self._ready: CommunicatorReady | None = None
        self._group: Sender | None = None
        self._attempt = ""  # of the newest call that owned the server
        self._closed = False

    # --- the server and its group

    def connect(self) -> CommunicatorReady:
        """Own the server, once, with a weight group unless an adapter is pushed.

        Raises:
            WeightSyncError: the server refused, or a side did not join in time.
            ContractError: another learner owns the server now.
        """
        senders = 1 if self._mode.adapter is None else 0
        if self._ready is None or self.senders != senders:
            self.init_communicator(self._new_group(senders))
        assert self._ready is not None
        return self._ready

    def _new_group(self, senders: int) -> InitCommunicator:
        """Return the call that forms a group with so many learner processes, or none with 0."""
        self.abandon()
        if self._closed:
            raise self._broken("learner", "reach", ConnectionAbortedError(_ABANDONED))
        host = urlsplit(self._client.base_url).hostname
        assert host is not None, f"{self._client.base_url} was validated with the config"
        workers = self._phase("reach", self._client.world_size) if senders else 0
        return InitCommunicator(
            host=self._phase("reach", partial(socket.gethostbyname, host)),
            port=self._port,
            world_size=max(senders, 1) + workers,
            senders=max(senders, 1),
            attempt=uuid4().hex,
            learner=f"the learner on {socket.gethostname()} (process {os.getpid()})",
            replaces=self._attempt or None,
            transport=self._transport if senders == self._peers.count else "gloo",
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
        )

    def init_communicator(self, init: InitCommunicator) -> None:
        """Own the server, and form the group; raises as `connect`."""
        call, given_up = partial(self._client.init_communicator, init), threading.Event()
        if init.world_size == 1:
            self._ready = self._phase("reach", call)
        else:
            join = partial(self._join_group, init, given_up, 0)
            try:
                self._ready, self._group = self._together("rendezvous", call, join)
            finally:
                given_up.set()
            self.senders = init.senders
        self._attempt = init.attempt
        if self._closed:  # another thread closed it meanwhile
            self.abandon()
            raise self._broken("learner", "rendezvous", ConnectionAbortedError(_ABANDONED))

    def abandon(self) -> None:
        """Leave a lost server and its group; the next push owns it and forms the group anew."""
        group, self._group, self._ready, self.senders = self._group, None, None, 0
        if group is not None:
            group.abandon()

    def close(self) -> None:
        """Leave for good and tell the server. A push that runs breaks."""
        owned, self._closed = self._ready is not None, True
        self.abandon()
        if owned:
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
                if adapter is not None:
                    report = self.load_adapter(version, adapter.safetensors(ready.dtype))
                else:
                    parameters = self._mode.full.metadata(ready.dtype)
                    self.start_weight_update(version, parameters)
                    self.update_weights(parameters, self._mode.full.tensors(ready.dtype))
                    report = self.finish_weight_update()
            except Exception as error:
                self.abandon()
                ends = isinstance(error, ContractError) or _is_lost(error)
                if adapter is None or ends or self._closed:
                    raise
                self._mode.adapter_failed(error)
                continue
            report.seconds["total"] = time.monotonic() - began
            return report

    def push_together(self, version: int, dtype: DtypeName) -> SyncReport:
        """Make `version` the weights of the server, in its type. All processes call it.

        A failure in one of them is raised in all.
        """
        began = time.monotonic()
        self._form_group_together()
        parameters = self._mode.full.metadata(dtype)
        start = partial(self.start_weight_update, version, parameters)
        broadcast_from_rank0(self._peers, start)
        sent = _Sent(self._mode.full.stream(dtype))

        def transfer() -> None:
            try:
                if self._peers.rank == 0:
                    self.update_weights(parameters, sent)
                else:
                    self._phase("transfer", partial(self._joined().send, parameters, sent))
            except Exception:
                for _ in sent:  # the other processes may wait for this one to gather
                    pass
                raise

        self._peers.all_gather(transfer)
        finished = broadcast_from_rank0(
            self._peers, lambda: self.finish_weight_update().model_dump(mode="json")
        )
        report = SyncReport.model_validate(finished)
        report.seconds["total"] = time.monotonic() - began
        return report

    def _form_group_together(self) -> None:
        """Form the groups of all processes, unless they are in them."""
        peers, given_up = self._peers, threading.Event()

        def needed() -> dict[str, Any] | None:
            if self.senders == peers.count:
                return None
            return self._new_group(peers.count).model_dump(mode="json")

        if (body := broadcast_from_rank0(peers, needed)) is None:
            return
        init, joining = InitCommunicator.model_validate(body), None
        if peers.rank != 0:
            self.abandon()
            joining = in_thread(partial(self._join_group, init, given_up, peers.rank))
        try:
            broadcast_from_rank0(peers, partial(self.init_communicator, init))
        except BaseException:  # the server will never open the group
            given_up.set()
            raise

        def joined() -> None:
            if joining is not None:
                self._group = self._phase("rendezvous", joining.result)

        peers.all_gather(joined)

    def start_weight_update(self, version: int, parameters: list[ParameterMeta]) -> None:
        """Send the manifest; the server drains and pauses."""
        body = StartWeightUpdate(attempt=self._attempt, version=version, parameters=parameters)
        self._phase("start", partial(self._client.start_weight_update, body))

    def update_weights(
        self, parameters: list[ParameterMeta], weights: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Send the weights while the server receives and loads them."""
        self._together(
            "transfer",
            partial(self._client.update_weights, GroupCall(attempt=self._attempt)),
            partial(self._joined().send, parameters, weights),
        )

    def _joined(self) -> Sender:
        """Return the group. Raises WeightSyncError if another thread has abandoned it."""
        if (group := self._group) is None:
            raise self._broken("learner", "transfer", ConnectionAbortedError(_ABANDONED))
        return group

    def finish_weight_update(self) -> SyncReport:
        """Have the server answer with the new weights."""
        call = GroupCall(attempt=self._attempt)
        return self._phase("finish", partial(self._client.finish_weight_update, call))

    def load_adapter(self, version: int, content: bytes) -> SyncReport:
        """Have the server answer with the adapter of a safetensors file."""
        call = partial(self._client.load_adapter, version, self._attempt, content)
        return self._phase("adapter", call)

    # --- one phase

    def _phase(self, phase: Phase, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except SERVER_ERRORS as error:
            raise self._broken("server", phase, error) from error
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's
            raise self._broken("learner", phase, error) from error

    def _together(
        self, phase: Phase, call: Callable[[], Answer], collective: Callable[[], T]
    ) -> tuple[Answer, T]:
        """Run a call of the server and the learner's part of a collective at the same time.

        A thread in a collective cannot be ended: it is left behind when the phase breaks.
        """
        limit_s = self._timeout_s + _ANSWER_MARGIN_S
        called, collected = in_thread(call), in_thread(collective)
        sides: list[tuple[Side, Future[Any]]] = [("server", called), ("learner", collected)]
        wait([part for _, part in sides], limit_s, FIRST_EXCEPTION)
        if collected.done() and collected.exception() is not None:
            wait([called], REASON_GRACE_S)
        late = TimeoutError(f"no end within {limit_s:g} s")
        failed = [(side, part.exception()) for side, part in sides if part.done()]
        failed += [(side, late) for side, part in sides if not part.done()]
        for side, error in failed:
            if error is not None:
                raise self._broken(side, phase, error) from error
        return called.result(), collected.result()

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
        if self._peers.count == 1:
            advice = f". {_NO_GROUP}" if phase == "rendezvous" else ""
            return WeightSyncError(side, url, phase, reason, advice)
        where = url if side == "server" else f"process {self._peers.rank}"
        return WeightSyncError(side, where, phase, reason)


class _Sent:
    """One pass of weights. A broken push is taken to its end by another thread."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self._taking = threading.Lock()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        with self._taking:
            return next(self._weights)


def _is_lost(error: Exception) -> bool:
    """Return whether the push of an adapter met a server that is gone or has another owner."""
    cause = error.__cause__
    if isinstance(cause, ProblemError):
        return cause.problem.kind in ("weight-update-order", "not-ready")
    return isinstance(cause, ServerUnreachable)
