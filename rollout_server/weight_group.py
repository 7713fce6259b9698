"""The weight group: the learner, every engine worker, and the calls to the workers in it.

It stands from the moment all have met until it is left, or broke because one of them was gone.
Which update runs over it is the concern of `rollout_server.weight_updates`.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from torch.distributed import TCPStore

from rollout_server.engine_types import EngineDead, WeightPhaseFailed
from rollout_server.group_store import open_group_store
from rollout_server.joint import all_of
from rollout_server.problems import refusal
from rollout_server.transfer_info import init_info
from rollout_server.updatable import UpdatableEngine, UpdatableEngines
from shared_contracts.errors import ProblemError
from shared_contracts.weights import GLOO_TRANSPORTS, InitCommunicator, Transport

T = TypeVar("T")

# Phases in which the workers wait for the learner.
WITH_THE_LEARNER = ("rendezvous", "transfer")


class WeightGroup:
    """formed: what the group that stands was asked for with; None without one.

    worker_margin_s: a worker gives up by itself after the group's `timeout_s`; so much later the
    server stops waiting for it.
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
        self._store: TCPStore | None = None
        self._heard: float | None = None  # when its learner, who means to stay, was heard of

    @property
    def address(self) -> str | None:
        """Where the group that stands has met; None without one."""
        return None if self.formed is None else f"{self.formed.host}:{self.formed.port}"

    @property
    def heard_s(self) -> float | None:
        """Seconds since the learner of the group was heard of; None without one.

        Nor is a guest's, who asked for it with `if_none` and leaves it at once.
        """
        return None if self._heard is None else time.monotonic() - self._heard

    def require(self, route: str, attempt: str | None = None) -> InitCommunicator:
        """The group that stands; ProblemError without one, or where it is of another attempt."""
        if self.formed is None:
            found = "there is no weight group; /init_communicator/ first"
            raise refusal("weight-update-order", found, route)
        if self.is_anothers(attempt):
            found = f"another group stands, which met at {self.address}"
            raise refusal("weight-update-order", found, "attempt")
        return self.formed

    def is_anothers(self, attempt: str | None) -> bool:
        """Whether the group that stands is of another attempt; None is of any."""
        return self.formed is not None and attempt not in (None, self.formed.attempt)

    def keep(self, attempt: str) -> None:
        """Note that the learner of the group lives."""
        self.require("/keep_communicator/", attempt)
        self._heard = time.monotonic()

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

    def check_alone(self, init: InitCommunicator) -> None:
        """Raise ProblemError where a guest would take the place of a group that stands."""
        if init.if_none and self.formed is not None:
            found = f"a weight group stands, which met at {self.address}"
            raise refusal("weight-update-order", found, "if_none")

    def stop_meeting(self) -> None:
        """Whoever still meets has been left by its learner."""
        self._store = None

    async def form(self, init: InitCommunicator) -> None:
        """Ends when the learner and every worker have joined."""
        if self._transport in GLOO_TRANSPORTS:
            await self._meet_at_a_store(init)
        else:
            await self._join(init)
        self.formed = init
        self._heard = None if init.if_none else time.monotonic()  # it has just been there

    async def leave(self) -> None:
        """Leave the group, if there is one; the port is free afterwards."""
        if self.formed is None:
            return
        init = self.formed
        self.broke()
        closes = [e.weight_phase("shutdown_weight_transfer_engine") for e in self._engines.alive()]
        await self.together("close", closes, init)

    def broke(self) -> None:
        """It does not stand any more: a rank has left it."""
        self.formed = self._heard = None

    async def _meet_at_a_store(self, init: InitCommunicator) -> None:
        """Open only until all have met, so that nobody meets a former group's store."""
        self._store = await asyncio.to_thread(
            open_group_store, init.host, init.port, init.timeout_s, init.attempt
        )
        try:
            await self._join(init)
        finally:
            self._store = None  # closes it

    async def _join(self, init: InitCommunicator) -> None:
        async def join(numbered: tuple[int, UpdatableEngine]) -> None:
            offset = 1 + numbered[0] * self._tensor_parallel_size
            info = init_info(init, self._transport, offset)
            await numbered[1].weight_phase("init_weight_transfer_engine", init_info=info)

        joins = [join(numbered) for numbered in enumerate(self._engines.all())]
        await self.together("rendezvous", joins, init)

    # --- calls in it

    async def together(
        self, phase: str, calls: Sequence[Awaitable[T]], init: InitCommunicator
    ) -> list[T]:
        """Await one call to the workers of each engine."""
        return await self.within(init.timeout_s + self._worker_margin_s, phase, calls, init)

    async def within(
        self, deadline_s: float, phase: str, calls: Sequence[Awaitable[T]], init: InitCommunicator
    ) -> list[T]:
        """Raises the problem that names the side, the address of the group and the phase."""
        began = time.monotonic()
        where = where_of(phase, init)
        try:
            return await all_of(calls, where, deadline_s, self._worker_margin_s)
        except (EngineDead, WeightPhaseFailed) as failure:
            missing = phase in WITH_THE_LEARNER and (
                time.monotonic() - began >= 0.95 * init.timeout_s
            )
            raise _as_problem(failure, where, init.timeout_s if missing else None) from failure


def where_of(phase: str, init: InitCommunicator) -> str:
    """As problems name it."""
    return f"{phase} at {init.host}:{init.port}"


def _as_problem(failure: Exception, where: str, waited_s: float | None) -> ProblemError:
    """waited_s: for the learner, in vain; None when it is not to blame."""
    if isinstance(failure, EngineDead):
        return refusal("not-ready", f"server: {failure}", where)
    if waited_s is not None:
        detail = f"learner (rank 0): missing for {waited_s:g} s; {failure}"
        return refusal("weight-transfer-timeout", detail, where)
    return refusal("weight-transfer-failed", f"server: {failure}", where)
