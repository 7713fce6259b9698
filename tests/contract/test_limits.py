"""Limits of bodies, calls and sequences; bodies that break the contract."""

import asyncio
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from rollout_server.http.app import create_app
from rollout_server.http.guards import MAX_FAULTS
from rollout_server.http.problems import RETRY_AFTER_S
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import CallRecord
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem
from shared_contracts.infer import MAX_REQUESTS, InferCall, RolloutEnvelope
from tests.contract.served_app import served_app
from tests.unit.fleets import wait_until
from tests.unit.scripted_server import envelope

JSON = {"Content-Type": "application/json"}
REQUEST = {"messages": [{"role": "user", "content": "x"}]}
POST_PATHS = (
    "/infer/",
    "/init_communicator/",
    "/start_weight_update/",
    "/update_weights/",
    "/finish_weight_update/",
)


def settings(**options: Any) -> ServerSettings:
    return ServerSettings(model=Path("/m"), device="cpu", **options)


def client_of(pool: Pool) -> TestClient:
    return TestClient(
        create_app(pool),
        base_url="http://127.0.0.1",
        follow_redirects=False,
        raise_server_exceptions=False,
    )


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A client of a server whose engines have not started."""
    with client_of(Pool(settings())) as client:
        yield client


class SlowPool(Pool):
    """Each call waits for `may_end`, and then has no answers."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self.running, self.may_end = threading.Event(), threading.Event()

    async def infer(self, call: InferCall, record: CallRecord) -> list[RolloutEnvelope]:
        self.running.set()
        await asyncio.to_thread(self.may_end.wait, 60)
        return []


def problem_of(answer: Any) -> Problem:
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
    problem = Problem.model_validate(answer.json())
    assert problem.status == answer.status_code
    return problem


@pytest.mark.req("SRV-06", "DIST-05")
def test_a_generation_whose_connection_ended_counts_once() -> None:
    pool = SlowPool(settings(max_concurrent_calls=1))
    with (
        served_app(create_app(pool)) as (host, port),
        httpx.Client(base_url=f"http://{host}:{port}", timeout=60, trust_env=False) as http,
    ):
        kept = {"infer_requests": [], "request_id": "kept"}
        for _ in range(2):  # the second call joins the generation of the first one
            with pytest.raises(httpx.ReadTimeout):
                http.post("/infer/", json=kept, timeout=0.5)
            assert pool.running.wait(60)
            wait_until(lambda: "rollout_calls_in_flight 0.0" in http.get("/metrics/").text)
        other = http.post("/infer/", json={"infer_requests": []})
        assert problem_of(other).kind == "too-many-calls"
        assert other.headers["Retry-After"] == str(RETRY_AFTER_S)
        assert http.get("/live/").status_code == 200
        pool.may_end.set()
        assert http.post("/infer/", json=kept).status_code == 200


class CountingPool(Pool):
    """Answers each call with one envelope. Its token is the number of the call."""

    calls = 0

    async def infer(self, call: InferCall, record: CallRecord) -> list[RolloutEnvelope]:
        self.calls += 1
        return [envelope([self.calls], [1])]


@pytest.mark.req("DIST-05", "WIRE-02")
def test_another_body_or_form_with_the_same_id_is_a_call_of_its_own() -> None:
    with client_of(CountingPool(settings())) as client:
        body: dict[str, Any] = {"infer_requests": [REQUEST], "request_id": "a"}
        for query, fields, call in (
            ("", {}, 1),
            ("?envelope=0", {}, 2),
            ("", {"expected_weights_version": 0}, 3),
            ("", {}, 1),
            ("?envelope=0", {}, 2),
        ):
            (found,) = client.post(f"/infer/{query}", json=body | fields).json()
            whole = envelope([call], [1]).model_dump(mode="json")
            assert found == (whole["response"] if query else whole)


@pytest.mark.req("SRV-06")
def test_call_of_too_many_requests_or_sequences_is_refused(client: TestClient) -> None:
    def refusal(client: TestClient, requests: int, n: int) -> tuple[int, str]:
        call = {"infer_requests": [REQUEST] * requests, "request_config": {"n": n}}
        problem = problem_of(client.post("/infer/", json=call))
        return problem.status, problem.where

    with client_of(Pool(settings(max_requests_per_call=6))) as few:
        assert refusal(few, 6, 1) == (503, "replicas")
        assert refusal(few, 3, 2) == (503, "replicas")
        assert refusal(few, 7, 1) == (422, "infer_requests")
        assert refusal(few, 3, 3) == (422, "request_config.n")
        assert refusal(few, 1, 10**30) == (422, "request_config.n")
    assert refusal(client, MAX_REQUESTS + 1, 1) == (422, "infer_requests")


@pytest.mark.req("SRV-06", "WIRE-05")
def test_answer_to_many_faults_is_short(client: TestClient) -> None:
    many = MAX_REQUESTS + 1
    fields = {f"field{number}": 1 for number in range(100)}
    for body in (
        {"infer_requests": [1] * many},
        {"infer_requests": [{"messages": [{"role": "user", "content": [1] * many}]}]},
        {"infer_requests": [], **fields},
        {"infer_requests": [REQUEST | {"k" * 10**6: 1}]},
    ):
        answer = client.post("/infer/", json=body)
        assert problem_of(answer).status == 422
        assert len(answer.content) < 2000
    problem = problem_of(client.post("/infer/", json={"infer_requests": [], **fields}))
    assert len(problem.errors or []) == 1
    problem = problem_of(client.post("/infer/", json={"infer_requests": [1] * 100}))
    assert [error["index"] for error in problem.errors or []] == list(range(MAX_FAULTS))


# --- odd bodies


def in_call(text: str) -> bytes:
    return b'{"infer_requests":[%s]%s}' % (json.dumps(REQUEST).encode(), text.encode())


ODD: dict[str, bytes] = {
    "endless list": b"[" * 10**5,
    "deep value in a field": in_call(f',"request_config":{"[" * 5000}{"]" * 5000}'),
    "number of many digits": in_call(f',"expected_weights_version":{"9" * 5000}'),
    "more than 64 bits": in_call(f',"request_config":{{"seed":{2**64}}}'),
    "NaN": in_call(',"request_config":{"temperature":NaN}'),
    "infinity by overflow": in_call(',"request_config":{"temperature":1e999}'),
    "lone surrogate in an id": in_call(',"request_id":"\\ud800"'),
    "not UTF-8": b'{"infer_requests":["\xff"]}',
    "nothing": b"",
    "pickle": pickle.dumps({"infer_requests": []}),
}


@pytest.mark.req("WIRE-05", "WIRE-07")
@pytest.mark.parametrize("name", ODD)
def test_odd_body_is_refused(client: TestClient, name: str) -> None:
    for path in POST_PATHS:
        problem = problem_of(client.post(path, content=ODD[name], headers=JSON))
        assert problem.status in (400, 422), (path, problem)
