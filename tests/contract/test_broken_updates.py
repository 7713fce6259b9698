"""An update that breaks, hangs or falls silent: what is poisoned, and what is not."""

import asyncio

import pytest

from rollout_server.engines.engine_protocol import EngineDead, WeightPhaseFailed
from shared_contracts.errors import ProblemError
from shared_contracts.weights import UpdateWeights
from tests.contract.update_bench import FAULT, Bench, Hang, answers, fails, hangs, run

BREAKS = [
    ("open_weight_update", WeightPhaseFailed("no"), 502),
    ("receive_weights", WeightPhaseFailed("no"), 502),
    ("complete_load", WeightPhaseFailed("no"), 502),
    ("read_back", WeightPhaseFailed("no"), 502),
    ("publish 7", WeightPhaseFailed("no"), 502),
    ("receive_weights", EngineDead("gone"), 503),
    ("receive_weights", KeyError("a bug"), None),
]


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize(("phase", "error", "status"), BREAKS)
def test_one_engine_that_breaks_poisons_all_and_a_full_push_heals(
    phase: str, error: Exception, status: int | None
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[1].script[phase] = fails(error)
        with pytest.raises((ProblemError, KeyError)) as caught:
            await bench.push(7)
        if isinstance(caught.value, ProblemError):
            assert caught.value.problem.status == status
        assert (bench.state, bench.updates.version) == ("POISONED", 0)
        transferring = phase == "receive_weights"
        for engine in bench.engines:
            leaves = ["leave_group"] if transferring else []
            cleaned = engine.calls.index("abandon_weight_update")
            assert engine.calls[cleaned:] == ["abandon_weight_update", "abort_all", *leaves]
            assert "resume" not in engine.calls
        with pytest.raises(ProblemError, match="full push"):
            await bench.updates.wait_until_ready()
        del bench.engines[1].script[phase]
        if transferring:
            with pytest.raises(ProblemError, match="no weight group"):
                await bench.start(8)
            await bench.init()
        await bench.push(8)
        await bench.updates.wait_until_ready()
        assert bench.updates.version == 8

    run(work())


@pytest.mark.req("SYNC-04")
def test_a_call_that_is_cancelled_in_the_transfer_poisons() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.start(1)
        bench.engines[0].script["receive_weights"] = hangs
        receiving = asyncio.ensure_future(
            bench.updates.receive(UpdateWeights(version=1, attempt=None))
        )
        while "receive_weights" not in bench.engines[0].calls:
            await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert bench.state == "POISONED"
        with pytest.raises(ProblemError, match="no weight group"):
            await bench.start(2)

    run(work())


@pytest.mark.req("SYNC-04")
def test_an_engine_that_never_answers_is_given_up() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=0.2)
        transfer, clean_up = Hang(), Hang()
        bench.engines[0].script["receive_weights"] = transfer
        bench.engines[0].script["abandon_weight_update"] = clean_up
        with pytest.raises(ProblemError) as caught:
            await bench.push(7)
        assert caught.value.problem.status == 504
        assert caught.value.problem.where.startswith("transfer at 127.0.0.1:")
        assert bench.state == "POISONED"
        assert transfer.given_up
        assert clean_up.given_up

    run(work())


@pytest.mark.req("SYNC-04")
def test_a_learner_that_asks_for_a_day_gets_what_the_server_allows() -> None:
    async def work() -> None:
        bench = Bench(longest_s=0.2)
        await bench.init(timeout_s=86400)
        assert [each.inits[0]["timeout_s"] for each in bench.engines] == [0.2, 0.2]
        bench.engines[0].script["receive_weights"] = hangs
        with pytest.raises(ProblemError, match=r"within 0\.3 s") as caught:
            await bench.push(7)
        assert caught.value.problem.status == 504

    run(work())


@pytest.mark.req("SYNC-04")
def test_a_slow_drain_takes_the_start_back_and_a_poisoned_server_stays_poisoned() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=1.0)
        bench.engines[0].script["pause"] = hangs
        with pytest.raises(ProblemError):
            await bench.start(1)
        assert bench.state == "READY"
        assert all(engine.calls[-1] == "resume" for engine in bench.engines)

        del bench.engines[0].script["pause"]
        bench.engines[0].script["receive_weights"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError):
            await bench.push(1)
        bench.engines[0].script = {"pause": hangs}
        with pytest.raises(ProblemError):
            await bench.start(1)
        assert bench.state == "POISONED"
        assert bench.engines[0].calls.count("resume") == 1

    run(work())


@pytest.mark.req("SYNC-04")
def test_silence_between_phases_poisons_but_a_long_phase_does_not() -> None:
    async def work() -> None:
        bench = Bench(worker_margin_s=5.0)
        await bench.init(timeout_s=0.2)
        await bench.start(1)

        async def slow() -> None:
            await asyncio.sleep(0.4)

        bench.engines[0].script["receive_weights"] = slow
        await bench.updates.receive(UpdateWeights(version=1, attempt=None))
        assert bench.state == "UPDATING"
        await asyncio.sleep(0.5)
        assert bench.state == "POISONED"

    run(work())


@pytest.mark.req("SRV-05", "SYNC-05")
def test_a_replica_lost_between_the_phases_of_an_update_poisons() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.start(1)
        bench.engines.lost = {0}
        with pytest.raises(ProblemError, match="an engine is gone"):
            await bench.updates.receive(UpdateWeights(version=1, attempt=None))
        assert bench.state == "POISONED"
        await bench.updates.replica_lost("replica 0 is lost")
        assert bench.state == "POISONED"
        assert bench.engines[1].calls[-1] == "leave_group"

    run(work())


@pytest.mark.req("SRV-05", "SYNC-05")
def test_a_replica_lost_while_the_update_drains_leaves_the_old_weights_serving() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()

        async def dies() -> None:
            bench.engines.lost = {1}
            raise EngineDead("replica 1 is dead")

        bench.engines[1].script["pause"] = dies
        with pytest.raises(ProblemError, match="replica 1 is dead"):
            await bench.start(1)
        assert bench.state == "READY"
        assert bench.engines[0].calls[-1] == "resume"

    run(work())


@pytest.mark.req("SRV-05", "SYNC-04")
def test_the_loss_of_one_engine_does_not_wait_for_another_that_hangs() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=60.0)
        hang = Hang()
        bench.engines[0].script["receive_weights"] = hang
        bench.engines[1].script["receive_weights"] = fails(EngineDead("replica 1 is dead"))
        with pytest.raises(ProblemError, match="replica 1 is dead"):
            await bench.push(1)
        assert hang.given_up

    run(work())


@pytest.mark.req("SYNC-05")
def test_a_start_that_cannot_be_taken_back_poisons() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[0].script["open_weight_update"] = answers([FAULT])
        bench.engines[1].script["abandon_weight_update"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError) as caught:
            await bench.start(1)
        assert caught.value.problem.where.startswith("start: undo at")
        assert bench.state == "POISONED"

    run(work())
