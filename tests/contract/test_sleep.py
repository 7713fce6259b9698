"""A server that gives the memory of its GPUs up, and takes it back for a push or for calls."""

import asyncio

import pytest

from rollout_server.engines.engine_protocol import EngineDead, WeightPhaseFailed
from shared_contracts.errors import ProblemError
from tests.contract.update_bench import Bench, fails, hangs, run

pytestmark = pytest.mark.req("ROLL-03")


@pytest.mark.req("SYNC-04")
def test_a_push_takes_the_weights_back_first_and_the_rest_at_its_end() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.updates.sleep()
        assert bench.updates.asleep
        with pytest.raises(ProblemError, match="/wake_up/ or a push") as caught:
            await bench.updates.wait_until_ready()
        assert caught.value.problem.status == 503
        before = len(bench.engines[0].calls)
        await bench.push(1)
        await bench.updates.wait_until_ready()
        assert not bench.updates.asleep
        for engine in bench.engines:
            assert engine.calls[before:] == [
                *("pause", "wake_weights", "open_weight_update", "receive_weights"),
                *("complete_load", "read_back", "publish 1", "resume"),
            ]

    run(work())


def test_without_a_push_the_weights_of_before_answer() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.push(1)
        await bench.updates.sleep()
        status = await bench.updates.wake_up()
        assert (status.state, status.weights_version) == ("READY", 1)
        await bench.updates.wait_until_ready()

    run(work())


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize("phase", ["wake_weights", "receive_weights", "read_back"])
def test_an_update_that_breaks_after_a_sleep_never_answers_with_half_of_the_weights(
    phase: str,
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.updates.sleep()
        bench.engines[1].script[phase] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError):
            await bench.push(1)
        assert bench.state == "POISONED"
        for refused in (bench.updates.sleep, bench.updates.wake_up):
            with pytest.raises(ProblemError, match="POISONED"):
                await refused()
        with pytest.raises(ProblemError, match="full push"):
            await bench.updates.wait_until_ready()
        assert "resume" not in bench.engines[0].calls

    run(work())


def test_an_engine_that_breaks_is_not_ready_and_one_that_hangs_is_given_up() -> None:
    async def work() -> None:
        bench = Bench(longest_s=1.0)
        bench.engines[1].script["sleep"] = fails(EngineDead("replica 1 did not move its memory"))
        with pytest.raises(ProblemError, match="did not move") as caught:
            await bench.updates.sleep()
        assert (caught.value.problem.status, caught.value.problem.where) == (503, "/sleep/")
        with pytest.raises(ProblemError, match="/wake_up/ or a push"):
            await bench.updates.wait_until_ready()
        bench.engines[1].script["sleep"] = hangs
        with pytest.raises(ProblemError) as caught:
            await bench.updates.sleep()
        assert caught.value.problem.status == 504
        await bench.updates.wake_up()
        await bench.updates.wait_until_ready()

    run(work())


def test_a_sleep_waits_for_no_update_that_is_begun() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.start(1)
        with pytest.raises(ProblemError, match="the state is UPDATING") as caught:
            await asyncio.wait_for(bench.updates.sleep(), 30)
        assert caught.value.problem.status == 409

    run(work())
