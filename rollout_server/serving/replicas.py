"""The replicas: each built, watched, and built again when it is lost (SRV-05).

            built                  its process died, or it gave no sign of life
    starting -----> has an engine ---------------------------------------------> dead
        ^                                                                         |
        +----------------------- again, after pauses that grow -------------------+

A replica that was built again holds the checkpoint's weights. It serves only when those
are the current ones, which the caller tells by the weights version.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from tenacity import AsyncRetrying, RetryCallState, wait_exponential

from rollout_server.engines.engine_protocol import GuardInactive, WatchedEngine
from rollout_server.runtime.concurrency import Silence
from rollout_server.runtime.refusals import refusal
from shared_contracts.server_info import ReplicaState, ReplicaStatus

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
# How often a watch looks at the engine's own report of its death.
LOOK_S = 0.25
LONGEST_PAUSE_S = 60.0


E = TypeVar("E", bound=WatchedEngine)


@dataclass
class _Slot(Generic[E]):
    """detail: why there is no engine."""

    index: int
    engine: E | None = None
    state: ReplicaState = "starting"
    detail: str = "its engine is being built"
    restarts: int = 0
    lost: int = 0

    @property
    def live_engine(self) -> E | None:
        return self.engine if self.engine is not None and self.engine.alive else None

    @property
    def losses(self) -> int:
        """Engines lost so far, also one that the watch has not noticed yet."""
        return self.lost + (self.engine is not None and not self.engine.alive)


class Replicas(Generic[E]):
    """`count` engines by index.

    build: makes the engine of an index; blocking, called in a thread.
    on_lost: told, before a lost replica is built again, why it was lost.
    hang_s: silence after which an engine is given up; time in which this process itself did not
        run does not count.
    proof_s: within which a new engine must have proven its repeat guard.
    """

    def __init__(
        self,
        count: int,
        build: Callable[[int], E],
        on_lost: Callable[[str], Awaitable[None]],
        hang_s: float,
        proof_s: float = 120.0,
    ) -> None:
        self._slots: list[_Slot[E]] = [_Slot(index) for index in range(count)]
        self._build = build
        self._on_lost = on_lost
        self._hang_s = hang_s
        self._proof_s = proof_s
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="replica")
        self._builds: list[Future[E]] = []
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Build every engine, side by side, then watch them.

        Raises what a failing build raises, once the other builds are over.
        """
        built = [self._fill(slot) for slot in self._slots]
        outcomes = await asyncio.gather(*built, return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if failures:
            await self.close()
            raise failures[0]
        self._watches = [asyncio.create_task(self._watch(slot)) for slot in self._slots]

    async def close(self) -> None:
        """End the engines' processes; a build that runs is left alone (see `building`)."""
        for watch in self._watches:
            watch.cancel()
        engines = [slot.engine for slot in self._slots if slot.engine is not None]
        for slot in self._slots:
            slot.engine, slot.state, slot.detail = None, "dead", "the server is stopping"
        await asyncio.gather(*(self._shut_down(engine) for engine in engines))

    @property
    def building(self) -> bool:
        """Whether a thread builds an engine now; nothing can stop it but its end."""
        return any(not build.done() for build in self._builds)

    @property
    def losses(self) -> int:
        """How many engines were lost so far; grows the moment one dies."""
        return sum(slot.losses for slot in self._slots)

    # --- who is there

    def all(self) -> list[E]:
        """Every engine, by index; raises the `not-ready` problem when one is missing."""
        missing = [_status(slot, None) for slot in self._slots if slot.live_engine is None]
        if missing:
            raise not_serving(missing)
        return self.alive()

    def alive(self) -> list[E]:
        engines = [slot.live_engine for slot in self._slots]
        return [engine for engine in engines if engine is not None]

    def current(self, version: int) -> list[E]:
        """The engines that hold `version`; raises the problem that says why there are none."""
        engines = [engine for engine in self.alive() if engine.weights_version == version]
        if not engines:
            raise not_serving(self.statuses(version))
        return engines

    def statuses(self, version: int | None) -> list[ReplicaStatus]:
        """version: of the weights that may answer; None when no engine's are in doubt."""
        return [_status(slot, version) for slot in self._slots]

    # --- one replica's life

    async def _watch(self, slot: _Slot[E]) -> None:
        while True:
            assert slot.engine is not None
            reason = await self._until_lost(slot.engine)
            await self._lose(slot, slot.engine, reason)
            await self._rebuild(slot)

    async def _until_lost(self, engine: E) -> str:
        beating = asyncio.ensure_future(_beat(engine, min(HEARTBEAT_S, self._hang_s / 4)))
        try:
            silence = Silence(LOOK_S)
            while not beating.done():
                if not engine.alive:
                    return "its process died"
                if silence.looked(engine.heartbeat_age_s) > self._hang_s:
                    return f"it gave no heartbeat for {self._hang_s:g} s"
                await asyncio.wait((beating,), timeout=LOOK_S)
            failure = beating.exception()
            return f"its heartbeat failed ({failure!r})" if engine.alive else "its process died"
        finally:
            beating.cancel()

    async def _lose(self, slot: _Slot[E], engine: E, reason: str) -> None:
        logger.error("replica %d is lost: %s", slot.index, reason)
        slot.engine, slot.state, slot.detail = None, "dead", reason
        slot.lost += 1
        engine.declare_dead()
        told, ended = await asyncio.gather(
            self._on_lost(f"replica {slot.index} is lost: {reason}"),
            self._shut_down(engine),
            return_exceptions=True,
        )
        for failure in (told, ended):
            if failure is not None:
                logger.error("after the loss of replica %d: %r", slot.index, failure)

    async def _rebuild(self, slot: _Slot[E]) -> None:
        """Try until it succeeds; every failure is told by the probes."""

        def told(attempt: RetryCallState) -> None:
            assert attempt.outcome is not None
            assert attempt.next_action is not None
            failure, pause_s = attempt.outcome.exception(), attempt.next_action.sleep
            slot.state = "dead"
            slot.detail = f"building it failed ({failure}); the next attempt is in {pause_s:g} s"
            logger.error("replica %d: %s", slot.index, slot.detail)

        waits = wait_exponential(max=LONGEST_PAUSE_S)
        async for attempt in AsyncRetrying(wait=waits, before_sleep=told):
            with attempt:
                await self._fill(slot)
        slot.restarts += 1
        logger.warning("replica %d was built again", slot.index)

    async def _fill(self, slot: _Slot[E]) -> None:
        """Build the engine of `slot` and let it prove that its repeat guard works."""
        slot.state, slot.detail = "starting", "its engine is being built"
        self._builds = [build for build in self._builds if not build.done()]
        build = self._threads.submit(self._build, slot.index)
        self._builds.append(build)
        engine = await asyncio.wrap_future(build)
        try:
            await self._prove(engine)
        except BaseException:
            if slot.lost:  # else the server ends, and vLLM need not report it
                engine.declare_dead()
            await self._shut_down(engine)
            raise
        slot.engine, slot.state, slot.detail = engine, "serving", ""

    async def _prove(self, engine: E) -> None:
        try:
            async with asyncio.timeout(self._proof_s):
                await engine.prepare()
        except TimeoutError:
            found = f"the engine was not done with the guard's test within {self._proof_s:g} s"
            raise GuardInactive(found) from None

    async def _shut_down(self, engine: E) -> None:
        await asyncio.wrap_future(self._threads.submit(engine.shutdown))


async def _beat(engine: WatchedEngine, interval_s: float) -> None:
    """Ask the engine for a sign of life again and again; ends when that fails."""
    while True:
        await engine.heartbeat()
        await asyncio.sleep(interval_s)


def _status(slot: _Slot[E], version: int | None) -> ReplicaStatus:
    state, detail, age = slot.state, slot.detail, None
    if slot.engine is not None:
        age = round(slot.engine.heartbeat_age_s, 3)
        if not slot.engine.alive:
            state, detail = "dead", "its process died"
        elif version is not None and slot.engine.weights_version != version:
            state, detail = "needs-push", f"it holds weights {slot.engine.weights_version}"
    return ReplicaStatus(
        index=slot.index,
        state=state,
        detail=detail,
        heartbeat_age_s=age,
        restarts=slot.restarts,
    )


def not_serving(statuses: list[ReplicaStatus]) -> Exception:
    """The problem that names each of these replicas and what it lacks.

    It is `push-needed` when nothing but a push is, else `not-ready`.
    """
    needs_push = all(status.state == "needs-push" for status in statuses)
    where = ", ".join(f"replicas[{status.index}]" for status in statuses)
    detail = "; ".join(f"replica {s.index} is {s.state}: {s.detail}" for s in statuses)
    return refusal("push-needed" if needs_push else "not-ready", detail, where)
