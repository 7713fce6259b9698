"""A trial push: what the engines hold is sent, received and compared, and nothing changes."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError

from learner.rollout.server_process import free_ports
from rollout_server.engines.engine_protocol import WeightPhaseFailed
from shared_contracts.errors import ProblemError
from shared_contracts.weights import (
    AdapterBase,
    AdapterMeta,
    FinishWeightUpdate,
    StartWeightUpdate,
    SyncReport,
    UpdateWeights,
)
from tests.contract.running_server import RunningServer, response_ids, text_request
from tests.contract.toy_checkpoints import read_weights
from tests.contract.update_bench import (
    DIGEST,
    FAULT,
    PARAMETER,
    Bench,
    Happening,
    answers,
    fails,
    run,
)
from tests.contract.weight_sender import (
    Weights,
    begin_transfer,
    digests,
    finish,
    manifest,
    push,
    weight_group,
)


def trial(version: int = 0) -> StartWeightUpdate:
    return StartWeightUpdate(
        version=version,
        parameters=[PARAMETER],
        base=AdapterBase(parameters=[PARAMETER], digests=[DIGEST]),
        trial=True,
        attempt=None,
    )


async def whole_trial(bench: Bench, version: int = 0) -> SyncReport:
    await bench.updates.start(trial(version))
    assert bench.state == "UPDATING"
    await bench.updates.receive(UpdateWeights(version=version, attempt=None))
    return await bench.updates.finish(
        FinishWeightUpdate(version=version, digests=[DIGEST], attempt=None)
    )


@pytest.mark.req("SYNC-05", "DEP-03")
def test_a_trial_opens_no_layer_and_publishes_nothing() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.push(3)
        for engine in bench.engines:
            engine.calls.clear()
        report = await whole_trial(bench, 3)
        phases = ["check_base", "open_trial", "receive_weights", "complete_load", "read_back"]
        for engine in bench.engines:
            assert engine.calls == ["pause", *phases, "resume"]
        assert (report.trial, report.verified, report.status.weights_version) == (True, 1, 3)
        assert (bench.state, bench.updates.version) == ("READY", 3)

    run(work())


@pytest.mark.req("SYNC-05", "DEP-03")
@pytest.mark.parametrize(
    ("phase", "happens"),
    [
        ("check_base", fails(WeightPhaseFailed("no"))),
        ("open_trial", fails(WeightPhaseFailed("no"))),
        ("receive_weights", fails(WeightPhaseFailed("no"))),
        ("complete_load", fails(WeightPhaseFailed("no"))),
        ("read_back", answers([[("m", 0, 0, 2, 1, 8)]])),
    ],
)
def test_a_trial_that_breaks_leaves_the_server_ready_and_a_push_goes_on(
    phase: str, happens: Happening
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[1].script[phase] = happens
        with pytest.raises(ProblemError):
            await whole_trial(bench)
        assert (bench.state, bench.updates.version) == ("READY", 0)
        for engine in bench.engines:
            assert "abandon_trial" in engine.calls
            assert engine.calls[-1] == "resume"
            assert not {"abandon_weight_update", "abort_all", "publish 0"} & set(engine.calls)
        assert (bench.updates.group.formed is None) == (phase == "receive_weights")
        bench.engines[1].script.clear()
        await bench.init()
        await bench.push(1)

    run(work())


@pytest.mark.req("SYNC-05")
def test_a_trial_that_cannot_be_taken_back_poisons() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[0].script = {
            "receive_weights": fails(WeightPhaseFailed("no")),
            "abandon_trial": fails(WeightPhaseFailed("nor this")),
        }
        await bench.updates.start(trial())
        with pytest.raises(ProblemError, match="nor this"):
            await bench.updates.receive(UpdateWeights(version=0, attempt=None))
        assert bench.state == "POISONED"

    run(work())


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize(
    ("answer", "kind", "found"),
    [
        (([], [[("m", 0, 0, 2, 1, 8)]]), "weights-differ", "replica 1 does not hold a"),
        (([FAULT], []), "manifest-mismatch", FAULT["detail"]),
    ],
)
def test_a_trial_of_what_the_engines_do_not_hold_is_refused(
    answer: Any, kind: str, found: str
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[1].script["check_base"] = answers(answer)
        with pytest.raises(ProblemError, match=found) as caught:
            await bench.updates.start(trial())
        assert caught.value.problem.kind == kind
        assert (bench.state, bench.updates.version) == ("READY", 0)
        assert all("open_trial" not in engine.calls for engine in bench.engines)

    run(work())


@pytest.mark.req("SYNC-05")
def test_only_the_version_that_every_replica_has_can_be_tried() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.push(2)
        for version in (1, 3):
            with pytest.raises(ProblemError, match=f"version {version} cannot be tried"):
                await bench.updates.start(trial(version))
        bench.engines[1].weights_version = 0
        with pytest.raises(ProblemError, match="cannot be tried"):
            await bench.updates.start(trial(2))
        without = trial(2).model_copy(update={"base": None})
        bench.engines[1].weights_version = 2
        with pytest.raises(ProblemError, match="the engines should hold"):
            await bench.updates.start(without)
        assert all(engine.calls.count("pause") == 1 for engine in bench.engines)

    run(work())


def test_a_trial_of_an_adapter_makes_no_sense() -> None:
    adapter = AdapterMeta(r=1, lora_alpha=1, target_modules=["q"])
    with pytest.raises(ValidationError, match="no adapter"):
        StartWeightUpdate(
            version=0, parameters=[PARAMETER], adapter=adapter, trial=True, attempt=None
        )


# --- in a real engine


@pytest.fixture(scope="module")
def weights(tied: Path) -> Weights:
    return read_weights(tied)


def begin_trial(
    http: httpx.Client, version: int, weights: Weights, sent: Weights
) -> httpx.Response:
    base = {
        "parameters": [p.model_dump() for p in manifest(weights)],
        "digests": digests(sent),
    }
    parameters = [p.model_dump() for p in manifest(sent)]
    body = {
        "version": version,
        "parameters": parameters,
        "base": base,
        "trial": True,
        "attempt": None,
    }
    return http.post("/start_weight_update/", json=body)


@pytest.fixture
def unchanged(server: RunningServer, weights: Weights) -> Iterator[int]:
    """The version of the server, whose answers and state must stay what they are."""
    before = response_ids(server.infer([text_request()])[0])
    version: int = server.http.get("/info/").json()["weights_version"]
    yield version
    health = server.http.get("/health/").json()
    assert (health["state"], health["weights_version"]) == ("READY", version)
    assert response_ids(server.infer([text_request()])[0]) == before


def finished_pushes(server: RunningServer) -> str:
    lines = server.http.get("/metrics/").text.splitlines()
    (found,) = [line for line in lines if line.startswith("rollout_weight_pushes_total ")]
    return found


NAME = "model.language_model.layers.0.self_attn.k_proj.weight"


@pytest.mark.req("SYNC-05", "SYNC-06", "DEP-03")
def test_a_tensor_the_engine_holds_goes_there_and_is_compared(
    server: RunningServer, weights: Weights, unchanged: int
) -> None:
    sent = {NAME: weights[NAME]}
    (port,) = free_ports(1)
    pushes = finished_pushes(server)
    with weight_group(server.http, port) as sender:
        assert server.http.get("/info/").json()["weight_group"] == f"127.0.0.1:{port}"
        started = begin_trial(server.http, unchanged, weights, sent)
        assert started.status_code == 200, started.text
        transfer = begin_transfer(server.http, unchanged)
        sender.send(sent)
        assert transfer.answer().status_code == 200, transfer.answer().text
        report = finish(server.http, unchanged, digests(sent))
        assert report.status_code == 200, report.text
    assert (report.json()["verified"], report.json()["trial"]) == (1, True)
    assert finished_pushes(server) == pushes
    server.http.post("/close_communicator/", json={"attempt": None})
    assert server.http.get("/info/").json()["weight_group"] is None


@pytest.mark.req("SYNC-05", "SYNC-06", "DEP-03")
def test_another_tensor_is_refused_and_one_changed_on_its_way_is_found(
    server: RunningServer, weights: Weights, unchanged: int
) -> None:
    sent, other = {NAME: weights[NAME]}, {NAME: torch.flip(weights[NAME], [0])}
    (port,) = free_ports(1)
    with weight_group(server.http, port) as sender:
        refused = begin_trial(server.http, unchanged, weights, other)
        assert refused.json()["type"] == "urn:rollmatch:weights-differ"
        assert begin_trial(server.http, unchanged, weights, sent).status_code == 200
        transfer = begin_transfer(server.http, unchanged)
        sender.send(other)
        assert transfer.answer().status_code == 200
        found = finish(server.http, unchanged, digests(sent))
    assert found.json()["errors"][0]["where"] == NAME
    server.http.post("/close_communicator/", json={"attempt": None})


@pytest.mark.req("SYNC-03", "SYNC-05")
def test_weights_are_pushed_after_a_trial_as_before_it(
    server: RunningServer, weights: Weights
) -> None:
    before = response_ids(server.infer([text_request()])[0])
    version = server.http.get("/info/").json()["weights_version"]
    sent = {NAME: weights[NAME]}
    (port,) = free_ports(1)
    with weight_group(server.http, port) as sender:
        for _ in range(2):
            assert begin_trial(server.http, version, weights, sent).status_code == 200
            transfer = begin_transfer(server.http, version)
            sender.send(sent)
            assert transfer.answer().status_code == 200
            assert finish(server.http, version, digests(sent)).status_code == 200
        push(server.http, sender, weights, version + 1)
    server.http.post("/close_communicator/", json={"attempt": None})
    assert server.http.get("/info/").json()["weights_version"] == version + 1
    assert response_ids(server.infer([text_request()])[0]) == before


@pytest.mark.req("SYNC-04", "DEP-03")
def test_a_learner_that_leaves_in_a_trial_does_no_harm(
    server: RunningServer, weights: Weights, unchanged: int
) -> None:
    sent = {NAME: weights[NAME]}
    (port,) = free_ports(1)
    with weight_group(server.http, port, timeout_s=5.0) as sender:
        assert begin_trial(server.http, unchanged, weights, sent).status_code == 200
        transfer = begin_transfer(server.http, unchanged)
        time.sleep(0.2)
        sender.hang_up()
        sender.leave = lambda: None  # type: ignore[method-assign]  # it has left
        assert transfer.answer().status_code in (502, 504)
