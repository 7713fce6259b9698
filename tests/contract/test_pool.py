"""What the probes and `/infer/` say of replicas in every state, with scripted engines."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import CallRecord
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import Problem, ProblemError
from shared_contracts.infer import InferCall
from tests.contract.test_replica_watch import ScriptedEngine

CALL = InferCall.model_validate(
    {"infer_requests": [{"messages": [{"role": "user", "content": "x"}]}]}
)


class ScriptedPool(Pool):
    """`engines` by index; those that are built again are held back while `holding`."""

    def __init__(self, replicas: int) -> None:
        super().__init__(ServerSettings(model=Path("/m"), device="cpu", replicas=replicas))
        self.engines: dict[int, ScriptedEngine] = {}
        self.failing = False

    def _build_engine(self, index: int) -> Any:
        if self.failing:
            raise RuntimeError("no memory")
        self.engines[index] = ScriptedEngine(index)
        return self.engines[index]

    def hold(self, version: int, *indices: int) -> None:
        """The server's weights are `version`, and those of these engines, too."""
        self._weights.version = version
        for index in indices:
            self.engines[index].weights_version = version


def run(replicas: int, scenario: Callable[[ScriptedPool], Awaitable[None]]) -> None:
    async def play() -> None:
        pool = ScriptedPool(replicas)
        await pool.start()
        try:
            await scenario(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(play(), 20))


def refusal_of(probe: Callable[[], object]) -> Problem:
    with pytest.raises(ProblemError) as error:
        probe()
    return error.value.problem


@pytest.mark.req("WIRE-06", "SRV-05")
def test_a_missing_replica_is_named_even_when_the_weights_are_broken() -> None:
    async def scenario(pool: ScriptedPool) -> None:
        pool.failing = True
        pool.weights.state = "POISONED"
        assert refusal_of(pool.health).type == "urn:rollmatch:weights-poisoned"
        pool.engines[1].alive = False
        problem = refusal_of(pool.health)
        assert (problem.type, problem.where) == ("urn:rollmatch:not-ready", "replicas[1]")

    run(2, scenario)


@pytest.mark.req("WIRE-06", "SYNC-07")
def test_a_replica_that_only_needs_a_push_is_told_as_such() -> None:
    async def scenario(pool: ScriptedPool) -> None:
        pool.hold(4, 0)
        problem = refusal_of(pool.health)
        assert (problem.type, problem.where) == ("urn:rollmatch:push-needed", "replicas[1]")
        assert [status.state for status in pool.info().replicas] == ["serving", "needs-push"]
        pool.hold(4, 0, 1)
        assert pool.health().weights_version == 4

    run(2, scenario)


@pytest.mark.req("WIRE-06", "SRV-05")
def test_a_call_to_a_server_without_current_weights_is_told_what_is_missing() -> None:
    async def scenario(pool: ScriptedPool) -> None:
        pool.hold(4)
        with pytest.raises(ProblemError) as error:
            await pool.infer(CALL, CallRecord("/infer/"))
        assert error.value.problem == refusal_of(pool.health)
        assert error.value.problem.status == 503

    run(1, scenario)


@pytest.mark.req("WIRE-03", "SYNC-07")
def test_the_epoch_changes_the_moment_a_replica_dies_and_stays() -> None:
    async def scenario(pool: ScriptedPool) -> None:
        before = pool.server_epoch
        pool.engines[0].alive = False
        after = pool.server_epoch
        assert after != before
        async with asyncio.timeout(10):
            while pool.info().replicas[0].restarts == 0:
                await asyncio.sleep(0.01)
        assert pool.server_epoch == after
        assert pool.live().server_epoch == after

    run(1, scenario)
