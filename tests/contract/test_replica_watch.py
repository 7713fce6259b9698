"""The life of a replica on scripted engines: lost, hung, rebuilt, without the current weights."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest

from rollout_server.engines.engine_protocol import GuardInactive
from rollout_server.serving.pool import Pool
from rollout_server.serving.replicas import Replicas
from rollout_server.serving.telemetry import CallRecord
from shared_contracts.errors import Problem, ProblemError
from shared_contracts.infer import InferCall
from tests.contract.scripted_engine import ScriptedEngine
from tests.contract.test_limits import REQUEST, settings

HANG_S = 2.0


class Bench:
    """Two replicas; the next builds wait for `hold` and raise `failures`."""

    def __init__(self) -> None:
        self.built: list[ScriptedEngine] = []
        self.failures: list[Exception] = []
        self.events: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.replicas = Replicas(2, self._build, self._on_lost, HANG_S)

    def _build(self, index: int) -> ScriptedEngine:
        self.hold.wait(60)
        if self.failures:
            raise self.failures.pop(0)
        self.events.append(f"built {index}")
        self.built.append(ScriptedEngine(index))
        return self.built[-1]

    async def _on_lost(self, reason: str) -> None:
        self.events.append(reason)

    def states(self, version: int = 0) -> list[str]:
        return [status.state for status in self.replicas.statuses(version)]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.01)


def run(scenario: Callable[[Bench], Awaitable[None]]) -> Bench:
    """Run `scenario` on replicas that have started, then close them."""

    async def play() -> Bench:
        bench = Bench()
        await bench.replicas.start()
        bench.built.sort(key=lambda engine: engine.index)
        try:
            await scenario(bench)
        finally:
            bench.hold.set()
            await bench.replicas.close()
        return bench

    return asyncio.run(asyncio.wait_for(play(), 120))


@pytest.mark.req("SRV-05")
def test_dead_replica_is_named_at_once_and_built_again() -> None:
    async def scenario(bench: Bench) -> None:
        first, second = bench.built
        bench.hold.clear()
        second.alive = False
        assert bench.states() == ["serving", "dead"]
        assert bench.replicas.losses == 1
        assert bench.replicas.current(0) == bench.replicas.alive() == [first]
        await bench.until(lambda: bench.states() == ["serving", "starting"])
        assert (second.given_up, second.ended) == (True, True)
        with pytest.raises(ProblemError) as error:
            bench.replicas.all()
        assert error.value.problem.where == "replicas[1]"
        bench.hold.set()
        await bench.until(lambda: bench.states() == ["serving", "serving"])
        assert [status.restarts for status in bench.replicas.statuses(0)] == [0, 1]
        assert bench.replicas.losses == 1
        assert bench.replicas.all() == [first, bench.built[2]]

    bench = run(scenario)
    assert bench.events[2:] == ["replica 1 is lost: its process died", "built 1"]
    assert all(engine.ended for engine in bench.built)


@pytest.mark.req("SRV-05")
def test_hung_replica_and_failed_heartbeat_are_given_up_with_their_reason() -> None:
    async def scenario(bench: Bench) -> None:
        bench.built[0].hung = True
        bench.built[1].failure = OSError("no such socket")
        await bench.until(lambda: len(bench.built) == 4)
        await bench.until(lambda: bench.states() == ["serving", "serving"])

    bench = run(scenario)
    assert [engine.given_up for engine in bench.built] == [True, True, False, False]
    assert {event for event in bench.events if "lost" in event} == {
        f"replica 0 is lost: it gave no heartbeat for {HANG_S:g} s",
        "replica 1 is lost: its heartbeat failed (OSError('no such socket'))",
    }


@pytest.mark.req("SRV-05")
def test_server_that_stood_still_gives_up_no_replica() -> None:
    """As after SIGSTOP and SIGCONT: by the clock the heartbeats are old, until the next one."""

    async def scenario(bench: Bench) -> None:
        for engine in bench.built:
            engine.heartbeat_age_s = 100 * HANG_S
        await bench.until(lambda: all(engine.heartbeat_age_s == 0 for engine in bench.built))
        assert bench.states() == ["serving", "serving"]
        assert bench.replicas.losses == 0

    assert len(run(scenario).built) == 2


@pytest.mark.req("SRV-05")
def test_replica_that_cannot_be_built_is_tried_again() -> None:
    async def scenario(bench: Bench) -> None:
        bench.failures = [RuntimeError("no memory")]
        bench.built[0].alive = False
        await bench.until(lambda: "no memory" in bench.replicas.statuses(0)[0].detail)
        assert bench.states() == ["dead", "serving"]
        await bench.until(lambda: bench.states() == ["serving", "serving"])

    run(scenario)


@pytest.mark.req("SRV-05")
def test_replica_serves_only_with_the_current_weights() -> None:
    async def scenario(bench: Bench) -> None:
        first, second = bench.built
        first.weights_version = second.weights_version = 4
        first.alive = False
        await bench.until(lambda: bench.states(version=4) == ["needs-push", "serving"])
        assert bench.replicas.current(4) == [second]
        assert len(bench.replicas.all()) == 2
        with pytest.raises(ProblemError) as error:
            bench.replicas.current(5)
        assert error.value.problem.status == 503
        bench.built[2].weights_version = 4
        assert bench.states(version=4) == ["serving", "serving"]

    run(scenario)


class GuardedEngine(ScriptedEngine):
    """The proof of its repeat guard works, fails or hangs."""

    def __init__(self, index: int, guard: Literal["works", "fails", "hangs"]) -> None:
        super().__init__(index)
        self._guard = guard

    async def prepare(self) -> None:
        if self._guard == "fails":
            raise GuardInactive("a rigged sequence was not ended")
        if self._guard == "hangs":
            await asyncio.Event().wait()


@pytest.mark.req("REP-06")
@pytest.mark.parametrize("guard", ["fails", "hangs"])
def test_engine_whose_guard_is_not_proven_never_serves(guard: Literal["fails", "hangs"]) -> None:
    engines: list[ScriptedEngine] = []

    def build(index: int) -> ScriptedEngine:
        engines.append(GuardedEngine(index, guard if index == 1 else "works"))
        return engines[-1]

    async def unexpected(_: str) -> None:
        raise AssertionError("no replica was lost")

    with pytest.raises(GuardInactive):
        asyncio.run(Replicas(2, build, unexpected, HANG_S, proof_s=0.2).start())
    assert [engine.ended for engine in engines] == [True, True]


# --- probes and calls of the pool


class ScriptedPool(Pool):
    """`engines`: the last one of each index; builds fail while `failing`."""

    def __init__(self, replicas: int) -> None:
        super().__init__(settings(replicas=replicas))
        self.engines: dict[int, ScriptedEngine] = {}
        self.failing = False

    def _build_engine(self, index: int) -> Any:
        if self.failing:
            raise RuntimeError("no memory")
        self.engines[index] = ScriptedEngine(index)
        return self.engines[index]

    def hold(self, version: int, *indices: int) -> None:
        """Set the version of the server's weights, and of these engines."""
        self._weights.version = version
        for index in indices:
            self.engines[index].weights_version = version


def run_pool(replicas: int, scenario: Callable[[ScriptedPool], Awaitable[None]]) -> None:
    async def play() -> None:
        pool = ScriptedPool(replicas)
        await pool.start()
        try:
            await scenario(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(play(), 60))


def refusal_of(probe: Callable[[], object]) -> Problem:
    with pytest.raises(ProblemError) as error:
        probe()
    return error.value.problem


@pytest.mark.req("WIRE-06", "SRV-05", "SYNC-07")
def test_health_and_calls_name_the_replica_that_lacks_weights_or_died() -> None:
    async def scenario(pool: ScriptedPool) -> None:
        pool.hold(4, 0)
        problem = refusal_of(pool.health)
        assert (problem.type, problem.where) == ("urn:rollmatch:push-needed", "replicas[1]")
        assert [status.state for status in pool.info().replicas] == ["serving", "needs-push"]
        pool.hold(5)
        call = InferCall.model_validate({"infer_requests": [REQUEST]})
        with pytest.raises(ProblemError) as error:
            await pool.infer(call, CallRecord("/infer/"))
        assert error.value.problem == refusal_of(pool.health)
        assert error.value.problem.status == 503
        pool.hold(4, 0, 1)
        assert pool.health().weights_version == 4
        pool.failing = True
        pool.engines[1].alive = False
        problem = refusal_of(pool.health)
        assert (problem.type, problem.where) == ("urn:rollmatch:not-ready", "replicas[1]")

    run_pool(2, scenario)


@pytest.mark.req("WIRE-03", "SYNC-07")
def test_epoch_changes_at_the_death_of_a_replica_and_stays_after_its_rebuild() -> None:
    async def scenario(pool: ScriptedPool) -> None:
        before = pool.server_epoch
        pool.engines[0].alive = False
        after = pool.server_epoch
        assert after != before
        while pool.info().replicas[0].restarts == 0:
            await asyncio.sleep(0.01)
        assert pool.server_epoch == pool.live().server_epoch == after

    run_pool(1, scenario)
