"""Replicas of scripted engines: started, lost, hung, rebuilt, asleep, without current weights."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from multiprocessing.context import SpawnProcess

import httpx
import pytest

from rollout_server.serve import print_failure
from rollout_server.serving.pool import Pool
from rollout_server.serving.replicas import Replicas
from rollout_server.serving.telemetry import CallRecord
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import ContractError, Problem, ProblemError
from shared_contracts.infer import InferCall
from shared_contracts.weights import WeightState
from tests.contract.scripted_engine import ScriptedEngine
from tests.contract.served_app import REQUEST, app_of, served_client, settings
from tests.contract.update_bench import Hang, asynchronous, fails, reached, refused
from tests.unit.fleets import wait_until

CALL = InferCall.model_validate({"infer_requests": [REQUEST]})
HANG_S = 2.0
START_S = 0.4


class StoppedProcess:
    """A build whose process stands still; it fails when the process ends."""

    def __init__(self) -> None:
        self.process: SpawnProcess | None = None

    def __call__(self) -> None:
        process = multiprocessing.get_context("spawn").Process(target=signal.pause)
        process.start()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        self.process = process
        process.join()
        raise RuntimeError("its process ended")


class Bench:
    """Two replicas; the next builds wait for `hold`, then call those of `faults`."""

    def __init__(self) -> None:
        self.built: list[ScriptedEngine] = []
        self.faults: list[Callable[[], None]] = []
        self.events: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.replicas = Replicas(2, self._build, self.events.append, HANG_S, START_S)

    def _build(self, index: int) -> ScriptedEngine:
        self.hold.wait(60)
        if self.faults:
            self.faults.pop(0)()
        self.events.append(f"built {index}")
        self.built.append(ScriptedEngine(index))
        return self.built[-1]

    def states(self, version: int = 0) -> list[str]:
        return [status.state for status in self.replicas.statuses(version)]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.01)


def run(scenario: Callable[[Bench], Awaitable[None]]) -> Bench:
    """Run `scenario` on replicas that have started, then close them."""

    async def play() -> Bench:
        bench, before = Bench(), asyncio.all_tasks()
        await bench.replicas.start()
        bench.built.sort(key=lambda engine: engine.index)
        try:
            await scenario(bench)
        finally:
            bench.hold.set()
            await bench.replicas.close()
        await bench.until(lambda: asyncio.all_tasks() == before)
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
        serving = bench.replicas.statuses(0)
        assert [(status.restarts, status.detail) for status in serving] == [(0, ""), (1, "")]
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
    """After SIGSTOP and SIGCONT the heartbeats are old by the clock until the next one."""

    async def scenario(bench: Bench) -> None:
        for engine in bench.built:
            engine.heartbeat_age_s = 100 * HANG_S
        await bench.until(lambda: all(engine.heartbeat_age_s == 0 for engine in bench.built))
        assert bench.states() == ["serving", "serving"]
        assert bench.replicas.losses == 0

    assert len(run(scenario).built) == 2


# --- starts without an end


@pytest.mark.req("REP-06", "SRV-04")
@pytest.mark.parametrize(
    ("fault", "error", "found"),
    [
        (ContractError("a", "no processor", "b"), ContractError, "no processor"),
        (TimeoutError("its own"), TimeoutError, "its own"),
        (None, TimeoutError, "replica 1: its engine is being prepared for over"),
    ],
)
def test_an_engine_whose_preparation_fails_or_does_not_end_never_serves(
    fault: Exception | None, error: type[Exception], found: str
) -> None:
    engines, lost = [ScriptedEngine(0), ScriptedEngine(1)], list[str]()
    engines[1].script["prepare"] = Hang() if fault is None else fails(fault)
    replicas = Replicas(2, engines.__getitem__, lost.append, HANG_S, START_S)
    with pytest.raises(error, match=found):
        asyncio.run(replicas.start())
    assert ([engine.ended for engine in engines], lost) == ([True, True], [])


@pytest.mark.req("SRV-05")
def test_a_rebuild_that_stands_still_is_killed_and_tried_again() -> None:
    stopped = StoppedProcess()

    async def scenario(bench: Bench) -> None:
        bench.faults = [stopped]
        bench.replicas._slots[0].began -= 100  # the time of its first start
        bench.built[0].alive = False
        await bench.until(lambda: stopped.process is not None)
        (lost, _) = bench.replicas.statuses(0)
        assert lost.state == "starting"
        assert lost.detail == "its engine is being built, for 0 s of at most 0.4 s"
        await bench.until(lambda: "for over 0.4 s" in bench.replicas.statuses(0)[0].detail)
        assert bench.states() == ["dead", "serving"]
        await bench.until(lambda: bench.states() == ["serving", "serving"])

    run(scenario)
    assert stopped.process is not None
    assert stopped.process.exitcode == -signal.SIGKILL


@pytest.mark.req("SRV-04")
def test_a_failed_start_is_printed_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    late = TimeoutError("replica 0: its engine is being built for over 0.1 s (--start-seconds)")
    assert print_failure(late, settings()) == 1
    expected = f"error: an engine could not start with /m; its log is above ({late})\n"
    assert capsys.readouterr().err == expected


# --- probes and calls of the pool


class ScriptedPool(Pool):
    """engines: the last one of each index."""

    def __init__(self, replicas: int) -> None:
        super().__init__(settings(replicas=replicas), self._build)
        self.engines: dict[int, ScriptedEngine] = {}

    def _build(self, _: ServerSettings, index: int) -> ScriptedEngine:
        self.engines[index] = ScriptedEngine(index)
        return self.engines[index]

    def hold(self, version: int, *indices: int) -> None:
        """Set the version of the server's weights, and of these engines."""
        self._weights.version = version
        for index in indices:
            self.engines[index].weights_version = version

    def enter(self, state: WeightState) -> None:
        self._weights._enter(state)

    def problem(self) -> Problem:
        with pytest.raises(ProblemError) as error:
            self.health()
        return error.value.problem


@pytest.mark.req("WIRE-03", "WIRE-06", "SRV-05", "SYNC-07")
@asynchronous
async def test_health_and_calls_name_the_replica_that_lacks_weights_or_died() -> None:
    """Its death, and not its rebuild, changes the server's epoch."""
    pool = ScriptedPool(2)
    await pool.start()
    pool.hold(4, 0)
    pool.engines[0].guard_active = True
    assert not pool.info().repeat_terminate.active, "an engine is without the guard"
    problem = pool.problem()
    assert (problem.type, problem.where) == ("urn:rollmatch:push-needed", "replicas[1]")
    assert [status.state for status in pool.info().replicas] == ["serving", "needs-push"]
    pool.hold(5)
    held = pool.problem()
    assert await refused(pool.infer(CALL, CallRecord("/infer/")), "push-needed") == held
    pool.hold(4, 0, 1)
    assert pool.health().weights_version == 4
    epoch = pool.server_epoch
    pool.engines[1].alive = False
    pool.hold(5)
    await refused(pool.infer(CALL, CallRecord("/infer/")), "not-ready")  # a push is not enough
    pool.hold(4)
    problem = pool.problem()
    assert (problem.type, problem.where) == ("urn:rollmatch:not-ready", "replicas[1]")
    lost = pool.server_epoch
    assert lost != epoch
    pool.enter("PUSH_NEEDED")
    await refused(pool.infer(CALL, CallRecord("/infer/")), "push-needed", "replica 1 is dead")
    assert pool.problem() == problem
    await reached(lambda: pool.info().replicas[1].restarts > 0)
    assert pool.server_epoch == pool.live().server_epoch == lost
    await pool.close()


@pytest.mark.req("SYNC-05", "SYNC-09")
@asynchronous
async def test_a_call_waits_for_the_end_of_a_push_and_ends_when_the_server_stops() -> None:
    pool = ScriptedPool(1)
    await pool.start()
    pool.hold(4, 0)
    pool.enter("UPDATING")
    assert pool.health().state == "UPDATING"
    call = asyncio.create_task(pool.infer(CALL, CallRecord("/infer/")))
    await asyncio.sleep(0.01)
    assert not call.done()
    pool.hold(5, 0)
    pool.enter("READY")
    (envelope,) = await call
    assert envelope.coordexp.weights_version == (5, 5)
    hang = pool.engines[0].script["generate"] = Hang()
    call = asyncio.create_task(pool.infer(CALL, CallRecord("/infer/")))
    await hang.begun.wait()
    pool.stop_calls()
    await refused(call, "not-ready", "the server is stopping")
    await reached(lambda: hang.cancelled)
    await pool.close()


@pytest.mark.req("ROLL-03", "SRV-02")
@asynchronous
async def test_sleep_answers_calls_that_wait_and_calls_that_come_during_its_drain() -> None:
    pool = ScriptedPool(1)
    await pool.start()
    engine, record = pool.engines[0], CallRecord("/infer/")
    drain = engine.script["sleep"] = Hang()
    await engine.pause()
    waiting = asyncio.create_task(pool.infer(CALL, record))
    await reached(lambda: engine.load.sequences > 0)
    asleep = asyncio.create_task(pool.weights.sleep())
    await drain.begun.wait()
    await refused(pool.infer(CALL, record), "push-needed", "/wake_up/ or a push")
    drain.end.set()
    await refused(waiting, "push-needed", "ended a sequence")
    await asleep
    await pool.weights.wake_up()
    await pool.infer(CALL, record)
    await pool.close()


@pytest.mark.req("ROLL-03", "SYNC-04")
@pytest.mark.parametrize(("route", "call"), [("/sleep/", "sleep"), ("/wake_up/", "resume")])
def test_sleep_and_wake_end_with_their_connection(route: str, call: str) -> None:
    pool, hang = ScriptedPool(1), Hang()
    with served_client(app_of(pool)) as http:
        pool.engines[0].script[call] = hang
        with pytest.raises(httpx.ReadTimeout):
            http.post(route, json={}, timeout=0.5)
        wait_until(lambda: hang.cancelled)
