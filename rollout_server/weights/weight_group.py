"""The weight group: the learner, every engine worker, and the calls to the workers in it.

It stands from the moment all have met until it is left, or broke because one of them was gone.
All meet at a store that the server process holds. Which update runs over the group is
the concern of `rollout_server.weights.weight_updates`.
"""

import asyncio
import errno
import socket
import time
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError, TCPStore

from rollout_server.engines.engine_protocol import (
    EngineDead,
    UpdatableEngine,
    UpdatableEngines,
    WeightPhaseFailed,
)
from rollout_server.runtime.concurrency import gather_with_deadline
from rollout_server.runtime.refusals import refusal
from shared_contracts.errors import ProblemError
from shared_contracts.weights import InitCommunicator, Transport, attempt_key

# How often the store is looked at for its learner.
LOOK_S = 0.02


def open_group_store(host: str, port: int, timeout_s: float, attempt: str = "") -> TCPStore:
    """A store on exactly `host:port`, open for as long as the object lives; blocking.

    attempt: of the call it is for; a learner looks for it, and meets nobody at a store of
        another one.

    Raises the `group-port-taken` problem when the port is not free, `invalid-request` when
    the address is none of this machine, `weight-transfer-timeout` when the time is too short
    even to open it.
    """
    listener = _listen(host, port)
    try:
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    except DistError:
        found = f"server: could not open its store at {host}:{port} within {timeout_s:g} s"
        raise refusal("weight-transfer-timeout", found, "timeout_s") from None
    store.set(attempt_key(attempt), "")
    return store


async def wait_for_learner(store: TCPStore, timeout_s: float) -> None:
    """Wait until a rank has begun to join at a store that was just opened.

    Raises TimeoutError.
    """
    async with asyncio.timeout(timeout_s):
        # Beside the key of the attempt stand those of the ranks.
        while await asyncio.to_thread(store.num_keys) < 2:
            await asyncio.sleep(LOOK_S)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        found = f"server: cannot listen on {host}:{port} ({error.strerror})"
        if error.errno == errno.EADDRINUSE:
            do = "give this server another group_port"
            raise refusal("group-port-taken", f"{found}; {do}", "port") from None
        do = "name an address of the server"
        raise refusal("invalid-request", f"{found}; {do}", "host") from None
    except TypeError as error:  # it cannot even be looked up
        listener.close()
        raise refusal("invalid-request", f"server: no address ({error})", "host") from None
    listener.listen()
    return listener


T = TypeVar("T")

# A worker gives up a rendezvous by itself, at its deadline or when another rank has given up; one
# that does not within this time after that is not waited for.
GIVES_UP_S = 2.0

# Phases in which the workers wait for the learner.
WITH_THE_LEARNER = ("rendezvous", "transfer")


class WeightGroup:
    """formed: what the group that stands was asked for with; None without one.

    worker_margin_s: a worker gives up by itself after the group's `timeout_s`; so much later the
    server stops waiting for it, and in a rendezvous after `GIVES_UP_S` at most.
    """

    def __init__(
        self,
        engines: UpdatableEngines,
        tensor_parallel_size: int,
        transport: Transport,
        worker_margin_s: float,
    ) -> None:
        self._engines = engines
        self._tensor_parallel_size = tensor_parallel_size
        self._transport = transport
        self._worker_margin_s = worker_margin_s
        self.formed: InitCommunicator | None = None
        self._forming: InitCommunicator | None = None
        self._store: TCPStore | None = None
        self._heard = 0.0  # when the learner of the group that forms or stands was heard of

    @property
    def address(self) -> str | None:
        """Where the group that stands has met; None without one."""
        return None if self.formed is None else f"{self.formed.host}:{self.formed.port}"

    @property
    def heard_s(self) -> float | None:
        """Seconds since the learner of the group was heard of; None without one.

        Nor of a probe, which asks for a group with `if_none` and leaves it at once.
        """
        return None if self.formed is None or self.formed.if_none else self.silent_s

    @property
    def silent_s(self) -> float:
        """Seconds since the learner of the group that forms or stands was heard of, or a probe."""
        return time.monotonic() - self._heard

    def hear(self) -> None:
        """Note that it was heard of now."""
        self._heard = time.monotonic()

    def require(self, route: str, attempt: str | None = None) -> InitCommunicator:
        """The group that stands; ProblemError without one, or where it is of another attempt."""
        if self.formed is None:
            found = "there is no weight group; /init_communicator/ first"
            raise refusal("weight-update-order", found, route)
        if self.is_anothers(attempt):
            found = f"another group exists, formed at {self.address}"
            raise refusal("weight-update-order", found, "attempt")
        return self.formed

    def is_anothers(self, attempt: str | None) -> bool:
        """Whether the group that stands is of another attempt; None is of any."""
        return self.formed is not None and attempt not in (None, self.formed.attempt)

    def heartbeat(self, attempt: str) -> None:
        """Note that the learner of the group lives, which may still be forming."""
        if self._forming is None or self._forming.attempt != attempt:
            self.require("/keep_communicator/", attempt)
        self.hear()

    # --- meeting and parting

    def check(self, init: InitCommunicator) -> None:
        """Raise ProblemError where this server's workers could not meet as asked."""
        workers = len(self._engines.all()) * self._tensor_parallel_size
        if init.world_size != 1 + workers:
            raise refusal(
                "invalid-request",
                f"is {init.world_size}, but the learner and {workers} engine worker(s) "
                f"make {1 + workers}",
                "world_size",
            )
        if init.transport != self._transport:
            raise refusal(
                "invalid-request",
                f"is {init.transport}, but the server was started with {self._transport}",
                "transport",
            )

    def check_only_if_free(self, init: InitCommunicator) -> None:
        """Raise ProblemError where a probe would take the place of a group that stands."""
        if init.if_none and self.formed is not None:
            found = f"a weight group exists, formed at {self.address}"
            raise refusal("weight-update-order", found, "if_none")

    async def form(self, init: InitCommunicator) -> None:
        """Ends when the learner and every worker have joined."""
        self._forming = init
        self.hear()
        try:
            await self._meet_at_a_store(init)
        finally:
            self._forming = None
        self.formed = init
        self.hear()  # it has just been there

    async def leave(self) -> None:
        """Leave the group, if there is one; the port is free afterwards."""
        if self.formed is None:
            return
        init = self.formed
        self.broke()
        closes = [e.weight_phase("leave_group") for e in self._engines.alive()]
        await self.together("close", closes, init)

    def broke(self) -> None:
        """It does not stand any more: a rank has left it."""
        self.formed = None

    async def _meet_at_a_store(self, init: InitCommunicator) -> None:
        """Open only until all have met, so that nobody meets a former group's store.

        The learner comes first: an engine whose worker waits for it answers nobody.
        """
        self._store = await asyncio.to_thread(
            open_group_store, init.host, init.port, init.timeout_s, init.attempt
        )
        try:
            try:
                await wait_for_learner(self._store, init.timeout_s)
            except TimeoutError:
                raise _learner_missing(where_of("rendezvous", init), init.timeout_s) from None
            await self._join(init)
        finally:
            self._store = None  # closes it

    async def _join(self, init: InitCommunicator) -> None:
        async def join(numbered: tuple[int, UpdatableEngine]) -> None:
            offset = 1 + numbered[0] * self._tensor_parallel_size
            await numbered[1].weight_phase(
                "join_group",
                init=init.model_dump(),
                transport=self._transport,
                rank_offset=offset,
            )

        joins = [join(numbered) for numbered in enumerate(self._engines.all())]
        margin_s = min(self._worker_margin_s, GIVES_UP_S)
        await self.within(init.timeout_s + margin_s, "rendezvous", joins, init, margin_s)

    # --- calls in it

    async def together(
        self, phase: str, calls: Sequence[Awaitable[T]], init: InitCommunicator
    ) -> list[T]:
        """Await one call to the workers of each engine."""
        return await self.within(init.timeout_s + self._worker_margin_s, phase, calls, init)

    async def within(
        self,
        deadline_s: float,
        phase: str,
        calls: Sequence[Awaitable[T]],
        init: InitCommunicator,
        margin_s: float | None = None,
    ) -> list[T]:
        """Raises the problem that names the side, the address of the group and the phase.

        margin_s: what the other calls have left when one has failed; None: `worker_margin_s`.
        """
        began = time.monotonic()
        where = where_of(phase, init)
        left_s = self._worker_margin_s if margin_s is None else margin_s
        try:
            return await gather_with_deadline(calls, where, deadline_s, left_s)
        except (EngineDead, WeightPhaseFailed) as failure:
            late = phase in WITH_THE_LEARNER and (time.monotonic() - began >= 0.95 * init.timeout_s)
            if late and phase == "rendezvous" and self._transport == "nccl":
                found = f"server: {failure}"  # its ranks name who was missing
                raise refusal("weight-transfer-timeout", found, where) from failure
            raise _as_problem(failure, where, init.timeout_s if late else None) from failure


def where_of(phase: str, init: InitCommunicator) -> str:
    """As problems name it."""
    return f"{phase} at {init.host}:{init.port}"


def _as_problem(failure: Exception, where: str, waited_s: float | None) -> ProblemError:
    """waited_s: for the learner, in vain; None when it is not to blame."""
    if isinstance(failure, EngineDead):
        return refusal("not-ready", f"server: {failure}", where)
    if waited_s is not None:
        return _learner_missing(where, waited_s, f"; {failure}")
    return refusal("weight-transfer-failed", f"server: {failure}", where)


def _learner_missing(where: str, waited_s: float, more: str = "") -> ProblemError:
    detail = f"learner (rank 0): missing for {waited_s:g} s{more}"
    return refusal("weight-transfer-timeout", detail, where)
