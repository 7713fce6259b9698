"""`Pushes` over two scripted engines, with learners that set their keys in a store in memory."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

import pytest
from torch.distributed import HashStore

from rollout_server.weights.pushes import Pushes
from shared_contracts.errors import Problem, ProblemError, refusal
from shared_contracts.weights import (
    CommunicatorReady,
    GroupCall,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
)
from tests.contract.scripted_engine import ScriptedEngine

P = ParamSpec("P")
# Of a group. No test waits so long: see `Clock`.
TIMEOUT_S = 1000.0
PARAMETER = ParameterMeta(name="a.weight", dtype="float32", shape=[2, 1])


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time a test can move on."""

    _skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self._skipped_s

    @classmethod
    def skip(cls, seconds: float = 10 * TIMEOUT_S) -> None:
        """Move the time of the running loop on."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, cls)
        loop._skipped_s += seconds


class Hang:
    """A call that does not end until `end` is set. cancelled: so it ended."""

    def __init__(self) -> None:
        self.begun, self.end = asyncio.Event(), asyncio.Event()
        self.cancelled = False

    async def __call__(self) -> None:
        self.begun.set()
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def fails(error: Exception) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


async def reached(condition: Callable[[], bool]) -> None:
    """Wait until it holds, for a minute at most."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def refused(call: Awaitable[object], kind: str, found: str | None = None) -> Problem:
    """Return the problem of `call`."""
    with pytest.raises(ProblemError, match=found) as caught:
        await call
    assert caught.value.problem.kind == kind
    return caught.value.problem


async def out_of_order(call: Awaitable[object], found: str) -> None:
    await refused(call, "weight-update-order", found)


class Engines(list[ScriptedEngine]):
    """Two engines."""

    def all(self) -> list[ScriptedEngine]:
        for engine in self:
            if not engine.alive:
                raise refusal("not-ready", "an engine is gone", f"replicas[{engine.index}]")
        return list(self)

    def alive(self) -> list[ScriptedEngine]:
        return [engine for engine in self if engine.alive]

    def build_again(self) -> None:
        """Replace those that are gone."""
        self[:] = [e if e.alive else ScriptedEngine(e.index) for e in self]


class Bench:
    """`init` and the calls after it are of the learner `attempt`. options: of `Pushes`."""

    def __init__(self, **options: Any) -> None:
        self.engines = Engines([ScriptedEngine(0), ScriptedEngine(1)])
        given: dict[str, Any] = {"workers": 2, "transport": "gloo", "longest_s": 10 * TIMEOUT_S}
        given |= {"open_store": self._open_store}
        self.pushes = Pushes(
            self.engines,
            server_epoch=lambda: "epoch",
            expected=lambda: {PARAMETER.name: PARAMETER.shape},
            **given | options,
        )
        self.attempt, self._comes = "", 0

    @classmethod
    async def formed(cls, **options: Any) -> "Bench":
        """Return a bench with a formed group."""
        bench = cls(**options)
        await bench.init()
        return bench

    async def init(
        self, attempt: str = "first", comes: int = 1, **fields: Any
    ) -> CommunicatorReady:
        """Take the server over. comes: senders that come to the store."""
        self.attempt, self._comes = attempt, comes
        given = {"host": "127.0.0.1", "port": 1, "world_size": 3, "timeout_s": TIMEOUT_S}
        given |= {"attempt": attempt, "learner": f"the {attempt} learner"} | fields
        return await self.pushes.init_communicator(InitCommunicator.model_validate(given))

    def _open_store(self, init: InitCommunicator) -> HashStore:
        store = HashStore()
        for number in range(self._comes):
            store.set(f"group/{number}/ready/0", "")
        return store

    @property
    def held(self) -> tuple[str, int]:
        """State and version."""
        return self.pushes.state, self.pushes.version

    async def start(self, version: int) -> None:
        body = StartWeightUpdate(attempt=self.attempt, version=version, parameters=[PARAMETER])
        await self.pushes.start_weight_update(body)

    async def update(self) -> None:
        await self.pushes.update_weights(GroupCall(attempt=self.attempt))

    async def finish(self) -> SyncReport:
        return await self.pushes.finish_weight_update(GroupCall(attempt=self.attempt))

    async def close(self, attempt: str) -> None:
        await self.pushes.close_communicator(GroupCall(attempt=attempt))

    async def push(self, version: int) -> SyncReport:
        await self.start(version)
        await self.update()
        return await self.finish()


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that runs in an event loop of its own, a `Clock`."""

    @wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=Clock) as runner:
            runner.run(test(*arguments, **named))

    return run
