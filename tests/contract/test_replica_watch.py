"""The life of a replica, with scripted engines: lost, hung, built again, in need of weights."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, cast

import pytest

from rollout_server.engines.engine_protocol import GuardInactive
from rollout_server.serving.replicas import Replicas
from shared_contracts.errors import ProblemError

HANG_S = 2.0


class ScriptedEngine:
    """hung: gives no sign of life any more."""

    def __init__(self, index: int, guard: Literal["works", "fails", "hangs"] = "works") -> None:
        self.index = index
        self.alive = True
        self.hung = False
        self.asleep = False
        self.weights_version = 0
        self.failure: Exception | None = None
        self.given_up = False
        self.ended = False
        self._guard = guard
        self._last_sign = time.monotonic()

    @property
    def heartbeat_age_s(self) -> float:
        return time.monotonic() - self._last_sign

    @property
    def guard_active(self) -> bool:
        return False

    @property
    def max_model_len(self) -> int:
        return 512

    async def heartbeat(self) -> None:
        if self.failure is not None:
            raise self.failure
        while self.hung:
            await asyncio.sleep(0.01)
        self._last_sign = time.monotonic()

    async def prepare(self) -> None:
        if self._guard == "fails":
            raise GuardInactive("a rigged sequence was not ended")
        if self._guard == "hangs":
            await asyncio.sleep(60)

    def declare_dead(self) -> None:
        self.given_up = True

    def shutdown(self) -> None:
        self.ended = True


class Bench:
    """Two replicas; `failures` are raised by the next builds, `hold` delays them."""

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
    """Play `scenario` on replicas that have started; they are closed afterwards."""

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
def test_a_dead_replica_is_named_at_once_and_built_again() -> None:
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
def test_why_a_heartbeat_failed_is_told() -> None:
    async def scenario(bench: Bench) -> None:
        bench.built[1].failure = OSError("no such socket")
        await bench.until(lambda: bench.replicas.losses == 1)

    lost = "replica 1 is lost: its heartbeat failed (OSError('no such socket'))"
    assert lost in run(scenario).events


@pytest.mark.req("SRV-05")
def test_a_hung_replica_is_given_up_and_built_again() -> None:
    async def scenario(bench: Bench) -> None:
        bench.built[0].hung = True
        await bench.until(lambda: len(bench.built) == 3)
        await bench.until(lambda: bench.states() == ["serving", "serving"])

    bench = run(scenario)
    assert bench.built[0].given_up
    assert not bench.built[1].given_up
    assert bench.events[2] == f"replica 0 is lost: it gave no heartbeat for {HANG_S:g} s"


@pytest.mark.req("SRV-05")
def test_a_server_that_stood_still_gives_no_replica_up() -> None:
    """As after SIGSTOP and SIGCONT, or a suspended laptop: heartbeats are late, engines are not."""

    async def scenario(bench: Bench) -> None:
        for _ in range(3):
            time.sleep(2 * HANG_S)
            await asyncio.sleep(0.05)
        assert bench.states() == ["serving", "serving"]
        assert bench.replicas.losses == 0

    assert len(run(scenario).built) == 2


@pytest.mark.req("SRV-05")
def test_a_replica_that_cannot_be_built_is_tried_again_and_says_why() -> None:
    async def scenario(bench: Bench) -> None:
        bench.failures = [RuntimeError("no memory")]
        bench.built[0].alive = False
        await bench.until(lambda: "no memory" in bench.replicas.statuses(0)[0].detail)
        assert bench.states() == ["dead", "serving"]
        await bench.until(lambda: bench.states() == ["serving", "serving"])

    run(scenario)


@pytest.mark.req("SRV-05")
def test_a_replica_serves_only_with_the_current_weights() -> None:
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


@pytest.mark.req("REP-06")
@pytest.mark.parametrize("guard", ["fails", "hangs"])
def test_an_engine_whose_guard_is_not_proven_never_serves(
    guard: Literal["fails", "hangs"],
) -> None:
    ended: list[ScriptedEngine] = []

    def build(index: int) -> ScriptedEngine:
        ended.append(ScriptedEngine(index, guard if index == 1 else "works"))
        return ended[-1]

    async def nobody(_: str) -> None:
        raise AssertionError("nothing was lost")

    with pytest.raises(GuardInactive):
        asyncio.run(Replicas(2, build, nobody, HANG_S, proof_s=0.2).start())
    assert [engine.ended for engine in ended] == [True, True]


class SilentLlm:
    """An engine that answers nothing."""

    async def collective_rpc(self, *_: Any, **__: Any) -> list[Any]:
        await asyncio.sleep(60)
        return []


@pytest.mark.req("SRV-05")
def test_an_engine_is_watched_again_once_a_weight_phase_was_given_up() -> None:
    from rollout_server.engines.vllm.engine import VllmEngine  # late: it imports vLLM

    async def work() -> None:
        silent = VllmEngine(cast(Any, SilentLlm()), 0, None)
        phase = asyncio.create_task(silent.weight_phase("update_weights"))
        await asyncio.sleep(0.05)
        assert silent.heartbeat_age_s == 0.0
        phase.cancel()
        await asyncio.gather(phase, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert silent.heartbeat_age_s > 0.0

    asyncio.run(work())
