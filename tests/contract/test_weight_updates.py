"""The phases of a weight update and its versions, with scripted engines."""

import pytest

from rollout_server.engines.engine_protocol import WeightPhaseFailed
from shared_contracts.errors import ProblemError
from shared_contracts.weights import MOST, MOST_VERSION_STEP, FinishWeightUpdate, UpdateWeights
from tests.contract.update_bench import Bench, answers, fails, run


@pytest.mark.req("SYNC-03")
def test_a_push_runs_its_phases_in_order_on_every_engine() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.push(7)
        for engine in bench.engines:
            assert engine.calls == [
                "join_group",
                "pause",
                "open_weight_update",
                "receive_weights",
                "complete_load",
                "read_back",
                "publish 7",
                "resume",
            ]
        assert (bench.state, bench.updates.version) == ("READY", 7)

    run(work())


@pytest.mark.req("SYNC-05")
def test_a_version_never_comes_again() -> None:
    """Else an engine built anew, at version 0, could pass for one with those weights."""

    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.push(3)
        for version in (0, 3):
            with pytest.raises(ProblemError, match="does not come after the server's, 3"):
                await bench.push(version)
            assert bench.state == "READY"
        await bench.push(4)

    run(work())


@pytest.mark.req("SYNC-05")
def test_no_push_uses_the_versions_up() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.push(2)
        for version in (2 + MOST_VERSION_STEP + 1, MOST):
            with pytest.raises(ProblemError, match="more than 1000000 after the server's, 2") as no:
                await bench.push(version)
            assert (no.value.problem.kind, no.value.problem.where) == (
                "weight-update-order",
                "version",
            )
            assert (bench.state, bench.updates.version) == ("READY", 2)
        await bench.push(2 + MOST_VERSION_STEP)  # a run that has pushed so often to others
        await bench.push(3 + MOST_VERSION_STEP)

    run(work())


@pytest.mark.req("SYNC-05", "SYNC-07")
def test_a_version_comes_again_to_a_replica_that_does_not_have_it_or_to_a_mixture() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.push(3)
        bench.engines[1].weights_version = 0
        with pytest.raises(ProblemError, match="does not come after"):
            await bench.push(2)
        await bench.push(3)
        assert [engine.weights_version for engine in bench.engines] == [3, 3]
        with pytest.raises(ProblemError, match="does not come after"):
            await bench.push(3)
        bench.engines[0].script["receive_weights"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError, match="broke"):
            await bench.push(4)
        del bench.engines[0].script["receive_weights"]
        await bench.init()
        await bench.push(3)
        assert (bench.state, bench.updates.version) == ("READY", 3)

    run(work())


@pytest.mark.req("SYNC-05")
def test_what_a_checkpoint_starts_with_is_never_pushed() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[0].script["receive_weights"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError, match="broke"):
            await bench.push(1)
        await bench.init()
        with pytest.raises(ProblemError, match="does not come after the server's, 0"):
            await bench.push(0)

    run(work())


@pytest.mark.req("SYNC-10")
def test_a_report_has_the_seconds_of_the_slowest_worker_and_what_was_compared() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[1].script["receive_weights"] = answers(
            {"transfer": 0.5, "load": 3.0}, {"transfer": 5.0, "load": 1.0}
        )
        report = await bench.push(1)
        assert set(report.seconds) == {"pause", "transfer", "load", "verify", "caches"}
        assert (report.seconds["transfer"], report.seconds["load"]) == (5.0, 7.0)
        assert (report.bytes, report.verified) == (8, 1)
        await bench.start(2)
        await bench.updates.receive(UpdateWeights(version=2, attempt=None))
        unverified = await bench.updates.finish(FinishWeightUpdate(version=2, attempt=None))
        assert unverified.verified == 0
        assert "read_back" not in bench.engines[0].calls[-5:]

    run(work())
