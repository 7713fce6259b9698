"""What an update brings is held against what the engines hold: manifest, base, digests."""

from typing import Any

import pytest

from rollout_server.engines.engine_protocol import WeightPhaseFailed
from shared_contracts.errors import ProblemError
from shared_contracts.weights import (
    AdapterBase,
    AdapterMeta,
    FinishWeightUpdate,
    ParameterDigest,
    StartWeightUpdate,
    UpdateWeights,
)
from tests.contract.update_bench import DIGEST, FAULT, PARAMETER, Bench, answers, fails, hangs, run


@pytest.mark.req("SYNC-05")
def test_a_manifest_that_does_not_fit_takes_the_start_back() -> None:
    async def work() -> None:
        bench = Bench(tensor_parallel_size=2)
        await bench.init()
        bench.engines[1].script["open_weight_update"] = answers([], [FAULT])
        with pytest.raises(ProblemError) as caught:
            await bench.start(1)
        problem = caught.value.problem
        assert (problem.status, problem.kind) == (422, "manifest-mismatch")
        assert problem.errors == [{"where": "a", "fault": "missing", "detail": FAULT["detail"]}]
        assert (bench.state, bench.updates.version) == ("READY", 0)
        for engine in bench.engines:
            assert engine.calls[-2:] == ["abandon_weight_update", "resume"]
        await bench.updates.wait_until_ready()

    run(work())


@pytest.mark.req("SYNC-05")
def test_a_manifest_that_does_not_fit_leaves_a_poisoned_server_paused() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[0].script["complete_load"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError):
            await bench.push(1)
        bench.engines[0].script = {"open_weight_update": answers([FAULT] * 2)}
        with pytest.raises(ProblemError, match="1 fault"):
            await bench.start(1)
        assert bench.state == "POISONED"
        assert all("resume" not in engine.calls for engine in bench.engines)

    run(work())


@pytest.mark.req("SYNC-06", "SYNC-05")
def test_weights_that_are_not_those_that_were_sent_poison_before_any_cache_is_reset() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[1].script["read_back"] = answers([[("m", 0, 0, 2, 1, 8)]])
        with pytest.raises(ProblemError) as caught:
            await bench.push(1)
        problem = caught.value.problem
        assert (problem.status, problem.kind) == (502, "weights-differ")
        assert problem.where.startswith("verify at 127.0.0.1:")
        detail = f"{7:016x} was sent, {8:016x} is held"
        assert problem.errors == [{"where": "a", "replica": 1, "detail": detail}]
        assert (bench.state, bench.updates.version) == ("POISONED", 0)
        for engine in bench.engines:
            assert not {"publish 1", "resume"} & set(engine.calls)

    run(work())


def over_base(digest: ParameterDigest = DIGEST) -> StartWeightUpdate:
    """An adapter, and the base it is for."""
    return StartWeightUpdate(
        version=1,
        parameters=[PARAMETER],
        adapter=AdapterMeta(r=1, lora_alpha=1, target_modules=["q"]),
        base=AdapterBase(parameters=[PARAMETER], digests=[digest]),
        attempt=None,
    )


@pytest.mark.req("SYNC-01", "SYNC-06")
def test_an_adapter_begins_after_its_base_was_compared_on_every_engine() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.updates.start(over_base())
        begun = ["pause", "adapter_faults", "check_base", "open_adapter_update"]
        assert all(engine.calls[1:] == begun for engine in bench.engines)
        assert bench.state == "UPDATING"

    run(work())


@pytest.mark.req("SYNC-01", "SYNC-06")
@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (([], [[("m", 0, 0, 2, 1, 8)]]), f"a: replica 1: {7:016x} was sent, {8:016x} is held"),
        (([FAULT], []), f"{FAULT['name']}: {FAULT['detail']}"),
    ],
    ids=["values", "manifest"],
)
def test_an_adapter_of_another_base_is_refused_and_changes_nothing(answer: Any, found: str) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[1].script["check_base"] = answers(answer)
        with pytest.raises(ProblemError) as caught:
            await bench.updates.start(over_base())
        problem = caught.value.problem
        assert (problem.status, problem.kind) == (422, "adapter-refused")
        assert f"the engines' weights are not the learner's base: {found}" in problem.detail
        assert (bench.state, bench.updates.version) == ("READY", 0)
        for engine in bench.engines:
            assert "open_adapter_update" not in engine.calls
            assert engine.calls[-1] == "resume"

    run(work())


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize(
    "body",
    [
        over_base().model_copy(update={"adapter": None}),
        over_base(DIGEST.model_copy(update={"name": "b"})),
        over_base(DIGEST.model_copy(update={"columns": [1]})),
    ],
    ids=["no adapter", "unknown digest", "columns"],
)
def test_a_base_that_makes_no_sense_is_refused_before_anything(body: StartWeightUpdate) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        with pytest.raises(ProblemError) as caught:
            await bench.updates.start(body)
        assert (caught.value.problem.kind, caught.value.problem.where) == (
            "invalid-request",
            "base",
        )
        assert bench.state == "READY"
        assert all("pause" not in engine.calls for engine in bench.engines)

    run(work())


@pytest.mark.req("SYNC-04", "SYNC-06")
def test_a_comparison_that_hangs_is_given_up_and_the_learner_is_not_blamed() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=0.2)
        bench.engines[0].script["read_back"] = hangs
        with pytest.raises(ProblemError) as caught:
            await bench.push(1)
        assert caught.value.problem.kind == "weight-transfer-timeout"
        assert caught.value.problem.detail.startswith("server:")
        assert caught.value.problem.where.startswith("verify at")
        assert bench.state == "POISONED"

    run(work())


@pytest.mark.req("SYNC-06")
def test_digests_of_what_is_not_in_the_manifest_are_refused_and_the_update_goes_on() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.start(1)
        await bench.updates.receive(UpdateWeights(version=1, attempt=None))
        for digests, complaint in (
            ([DIGEST.model_copy(update={"name": "b"})], "b is not in the manifest"),
            ([DIGEST, DIGEST], "two digests"),
            ([DIGEST.model_copy(update={"columns": [1]})], "a has 1 column"),
            ([DIGEST.model_copy(update={"columns": []})], "ascending"),
        ):
            with pytest.raises(ProblemError, match=complaint) as caught:
                await bench.updates.finish(
                    FinishWeightUpdate(version=1, digests=digests, attempt=None)
                )
            assert caught.value.problem.status == 422
        report = await bench.updates.finish(
            FinishWeightUpdate(version=1, digests=[DIGEST], attempt=None)
        )
        assert report.status.state == "READY"

    run(work())
