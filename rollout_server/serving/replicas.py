"""Engine replicas: built, watched, and rebuilt after a loss (SRV-05).

            built and prepared     its process died, or heartbeats stopped
    starting -----> serving ----------------------------------------------> dead
        ^                                                                     |
        +----------------- rebuilt, with exponential backoff -----------------+

A rebuilt replica has the checkpoint's weights. It serves only if these are the current weights, by
the caller's weights version.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, wait_exponential

from rollout_server.engines.engine_protocol import FIRST_VERSION, Engine
from rollout_server.runtime.processes import kill_children
from shared_contracts.errors import refusal
from shared_contracts.server_info import ReplicaState, ReplicaStatus

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
POLL_S = 0.25
LONGEST_PAUSE_S = 60.0

T = TypeVar("T")


@dataclass
class _Slot:
    """One replica.

    detail: reason for a missing engine. began: clock at the begin of a start's newest phase.
    threads: one thread that builds all its engines, because a parent-death signal follows the
    thread that started a process. thread: its native id.
    """

    index: int
    engine: Engine | None = None
    state: ReplicaState = "starting"
    detail: str = "its engine is being built"
    began: float = field(default_factory=time.monotonic)
    restarts: int = 0
    lost: int = 0
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "replica"))
    thread: int = 0


@dataclass
class Replicas:
    """`count` engines by index.

    build: makes the engine of an index; blocking, called in a thread.
    on_lost: called with the reason, before a lost replica is rebuilt.
    hang_s: seconds without a heartbeat after which an engine is lost.
        The time of a suspended process does not count.
    start_s: deadline of each phase of a start.
    """

    count: int
    build: Callable[[int], Engine]
    on_lost: Callable[[str], None]
    hang_s: float
    start_s: float

    def __post_init__(self) -> None:
        self._slots = [_Slot(index) for index in range(self.count)]
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Build all engines in parallel, then watch them.

        Raises the first failure after the end of all builds.
        """
        starts = [self._start_engine(slot) for slot in self._slots]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if failures:
            await self.close()
            raise failures[0]
        self._watches = [asyncio.create_task(self._watch(slot)) for slot in self._slots]

    async def close(self) -> None:
        """End the engines' processes, except those of running builds."""
        for watch in self._watches:
            watch.cancel()
        ends = [_shut_down(slot, slot.engine) for slot in self._slots if slot.engine is not None]
        for slot in self._slots:
            slot.engine, slot.state, slot.detail = None, "dead", "the server is stopping"
        await asyncio.gather(*ends)

    @property
    def losses(self) -> int:
        """Number of engines lost so far; increases as soon as an engine dies."""
        engines = [slot.engine for slot in self._slots if slot.engine is not None]
        return sum(slot.lost for slot in self._slots) + len(engines) - len(self.alive())

    def all(self) -> list[Engine]:
        """Return all engines by index; raises the `not-ready` problem if one is missing."""
        if missing := [status for status in self.statuses(None) if status.state != "serving"]:
            raise not_serving(missing)
        return self.alive()

    def alive(self) -> list[Engine]:
        engines = [slot.engine for slot in self._slots]
        return [engine for engine in engines if engine is not None and engine.alive]

    def current(self, version: int) -> list[Engine]:
        """Return the engines with `version`; raises the problem of `not_serving` without any.

        version: -1 after a failed push: also engines that are being rebuilt will need a push.
        """
        engines = [e for e in self.alive() if e.weights_version == version and not e.asleep]
        if not engines:
            raise not_serving(self.statuses(version), needs_push=version < FIRST_VERSION)
        return engines

    def statuses(self, version: int | None) -> list[ReplicaStatus]:
        """Return all statuses. version: of the weights that may answer; None during a push."""
        return [self._status(slot, version) for slot in self._slots]

    def _status(self, slot: _Slot, version: int | None) -> ReplicaStatus:
        engine, state, detail = slot.engine, slot.state, slot.detail
        if state == "starting":
            detail += f", for {time.monotonic() - slot.began:.0f} s of at most {self.start_s:g} s"
        if engine is not None and not engine.alive:
            state, detail = "dead", "its process died"
        elif engine is not None and version not in (None, engine.weights_version):
            state, detail = "needs-push", f"it holds weights {engine.weights_version}"
        elif engine is not None and version is not None and engine.asleep:
            state, detail = "asleep", "/wake_up/ or a push comes first"
        return ReplicaStatus(
            index=slot.index,
            state=state,
            detail=detail,
            heartbeat_age_s=None if engine is None else round(engine.heartbeat_age_s, 3),
            restarts=slot.restarts,
        )

    async def _watch(self, slot: _Slot) -> None:
        while True:
            assert slot.engine is not None
            reason = await self._until_lost(slot.engine)
            await self._lose(slot, slot.engine, reason)
            await self._rebuild(slot)

    async def _until_lost(self, engine: Engine) -> str:
        beating = asyncio.ensure_future(_beat(engine, min(HEARTBEAT_S, self.hang_s / 4)))
        try:
            silent_s = 0.0
            while not beating.done():
                if not engine.alive:
                    return "its process died"
                # A clock alone would count the time in which this process did not run.
                silent_s = min(engine.heartbeat_age_s, silent_s + POLL_S)
                if silent_s > self.hang_s:
                    return f"it gave no heartbeat for {self.hang_s:g} s"
                await asyncio.wait((beating,), timeout=POLL_S)
            failure = beating.exception()
            return f"its heartbeat failed ({failure!r})" if engine.alive else "its process died"
        finally:
            beating.cancel()

    async def _lose(self, slot: _Slot, engine: Engine, reason: str) -> None:
        logger.error("replica %d is lost: %s", slot.index, reason)
        slot.engine, slot.state, slot.detail = None, "dead", reason
        slot.lost += 1
        engine.declare_dead()
        self.on_lost(f"replica {slot.index} is lost: {reason}")
        (failure,) = await asyncio.gather(_shut_down(slot, engine), return_exceptions=True)
        if failure is not None:
            logger.error("after the loss of replica %d: %r", slot.index, failure)

    async def _rebuild(self, slot: _Slot) -> None:
        """Start an engine, with retries until it succeeds; `detail` has the last failure."""

        def note_failure(attempt: RetryCallState) -> None:
            assert attempt.outcome is not None
            failure, pause_s = attempt.outcome.exception(), attempt.upcoming_sleep
            slot.state = "dead"
            slot.detail = f"building it failed ({failure}); the next attempt is in {pause_s:g} s"
            logger.error("replica %d: %s", slot.index, slot.detail)

        waits = wait_exponential(max=LONGEST_PAUSE_S)
        await AsyncRetrying(wait=waits, before_sleep=note_failure)(self._start_engine, slot)
        slot.restarts += 1
        logger.warning("replica %d was built again", slot.index)

    async def _start_engine(self, slot: _Slot) -> None:
        """Build and prepare the engine of `slot`; on a TimeoutError, kill its processes."""

        def build() -> Engine:
            slot.thread = threading.get_native_id()
            return self.build(slot.index)

        building = slot.threads.submit(build)
        try:
            built = asyncio.wrap_future(building)
            engine = await self._phase(slot, "its engine is being built", built)
            await self._phase(slot, "its engine is being prepared", engine.prepare())
        except BaseException as error:
            if isinstance(error, TimeoutError):
                kill_children(slot.thread)
            end = slot.threads.submit(_discard, building, reported=slot.lost > 0)
            if building.done():
                await asyncio.wrap_future(end)
            raise
        slot.engine, slot.state, slot.detail = engine, "serving", ""

    async def _phase(self, slot: _Slot, name: str, work: Awaitable[T]) -> T:
        slot.state, slot.detail, slot.began = "starting", name, time.monotonic()
        try:
            async with asyncio.timeout(self.start_s) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():  # the engine's own
                raise
            found = f"replica {slot.index}: {name} for over {self.start_s:g} s (--start-seconds)"
            raise TimeoutError(found) from None


async def _shut_down(slot: _Slot, engine: Engine) -> None:
    await asyncio.wrap_future(slot.threads.submit(engine.shutdown))


def _discard(build: Future[Engine], reported: bool) -> None:
    """Shut down the engine of a failed start, if it was built. reported: the death is expected."""
    if not build.cancelled() and build.exception() is None:
        if reported:
            build.result().declare_dead()
        build.result().shutdown()


async def _beat(engine: Engine, interval_s: float) -> None:
    """Request a heartbeat every `interval_s` seconds, until one fails."""
    while True:
        await engine.heartbeat()
        await asyncio.sleep(interval_s)


def not_serving(statuses: list[ReplicaStatus], needs_push: bool = False) -> Exception:
    """Return the problem with each of these replicas and its reason.

    It is `push-needed` with `needs_push` or if a push is enough for all of them, else `not-ready`.
    """
    needs_push |= all(status.state in ("needs-push", "asleep") for status in statuses)
    where = ", ".join(f"replicas[{status.index}]" for status in statuses)
    detail = "; ".join(f"replica {s.index} is {s.state}: {s.detail}" for s in statuses)
    return refusal("push-needed" if needs_push else "not-ready", detail, where)
