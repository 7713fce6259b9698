"""Routes, probes, problem documents, limits and odd bodies, without an engine behind them."""

import asyncio
import json
import pickle
import re
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import HTTPException
from fastapi.testclient import TestClient
from starlette.types import Receive, Scope, Send

from rollout_server.http.app import create_app
from rollout_server.http.guards import MAX_FAULTS, BodyLimit
from rollout_server.http.problems import RETRY_AFTER_S
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import CallRecord
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem
from shared_contracts.infer import MAX_REQUESTS, InferCall, RolloutEnvelope
from tests.contract.served_app import REQUEST, client_of, problem_of, served_client, settings
from tests.contract.update_bench import Clock, asynchronous, reached
from tests.unit.fleets import wait_until
from tests.unit.scripted_server import envelope

GET_PATHS = ("/health/", "/live/", "/get_world_size/", "/info/", "/metrics/")
# Of a push, without their attempt.
BODIES: dict[str, Any] = {
    "/init_communicator/": {"host": "127.0.0.1", "port": 5000, "world_size": 4},
    "/start_weight_update/": {
        "version": 1,
        "parameters": [{"name": "a", "dtype": "float32", "shape": [1]}],
    },
    "/update_weights/": {},
    "/finish_weight_update/": {},
    "/close_communicator/": {},
}
JSON = {"content-type": "application/json"}
ADAPTER, AS_BYTES = "/load_adapter/", {"content-type": "application/octet-stream"}
OTHERS = ("/infer/", ADAPTER, "/sleep/", "/wake_up/")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(replicas=3) as client:
        yield client


@pytest.mark.req("WIRE-06")
def test_server_without_engines_lives_and_is_not_healthy(client: TestClient) -> None:
    assert client.get("/live/").json()["heartbeat_age_s"] == [None] * 3
    assert client.get("/get_world_size/").json() == {"world_size": 3}
    problem = problem_of(client.get("/health/"))
    assert problem.status == 503
    building = r"replica 0: its engine is being built, for \d+ s of at most 1800 s"
    assert re.match(f"the engines are starting; {building}", problem.detail)


@pytest.mark.req("WIRE-06", "WIRE-07")
def test_docs_page_needs_no_file_from_elsewhere(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    addresses = re.findall(r"""(?:src|href|url)(?:=|: )["']([^"']+)""", page.text)
    assert len(addresses) == 4
    for address in addresses:
        assert address.startswith("/")
        assert len(client.get(address).content) > 1000


@pytest.mark.req("WIRE-05", "OAI-01")
def test_errors_of_the_framework_are_problems(client: TestClient) -> None:
    for path in ("/nothing/", "/v1/models", "/v1/chat/completions/"):  # without `--openai`
        assert problem_of(client.get(path)).type == "urn:rollmatch:not-found"
    wrong_method = client.get("/infer/")
    assert problem_of(wrong_method).type == "urn:rollmatch:method-not-allowed"
    assert wrong_method.headers["allow"] == "POST"
    invalid = client.post("/infer/", content=b"{", headers=JSON)
    assert problem_of(invalid).type == "urn:rollmatch:bad-request"
    line_feed = client.post("/infer/%0A", json={"infer_requests": []})
    assert problem_of(line_feed).type == "urn:rollmatch:not-ready"


@pytest.mark.req("WIRE-05")
def test_malformed_requests_are_named_with_their_indices(client: TestClient) -> None:
    bad = [REQUEST | {"surprise": 1}, {"messages": []}, REQUEST | {"videos": ["a.mp4"]}]
    body = {"infer_requests": [REQUEST, *bad], "request_config": {"top_p": 0.0}}
    problem = problem_of(client.post("/infer/", json=body))
    assert problem.type == "urn:rollmatch:invalid-request"
    assert problem.errors is not None
    assert [(e.get("index"), e["where"]) for e in problem.errors] == [
        (1, "infer_requests[1].surprise"),
        (2, "infer_requests[2].messages"),
        (3, "infer_requests[3].videos"),
        (None, "request_config.top_p"),
    ]
    assert "field 'videos' is not served" in problem.errors[2]["detail"]


@pytest.mark.req("WIRE-05")
@pytest.mark.parametrize(
    ("content", "faults"),
    [
        (
            [{"type": "text", "txt": "x"}],
            {
                "": "Input should be a valid string",
                "[0].text": "Field required",
                "[0].txt": "Extra inputs are not permitted",
            },
        ),
        ([{"type": "sound"}], {"": "Input should be", "[0]": "Input tag 'sound'"}),
    ],
)
def test_faults_are_named_by_the_keys_of_the_body(
    client: TestClient, content: Any, faults: dict[str, str]
) -> None:
    body = {"infer_requests": [{"messages": [{"role": "user", "content": content}]}]}
    errors = problem_of(client.post("/infer/", json=body)).errors or []
    at = "infer_requests[0].messages[0].content"
    assert [error["where"] for error in errors] == [at + below for below in faults]
    for error, detail in zip(errors, faults.values(), strict=True):
        assert error["detail"].startswith(detail)
        assert error["index"] == 0


@pytest.mark.req("SRV-06", "WIRE-05")
def test_weight_call_without_its_attempt_is_refused(client: TestClient) -> None:
    for path, body in BODIES.items():
        problem = problem_of(client.post(path, json=body))
        assert (problem.status, problem.where) == (422, "attempt")
    for query in ("version=1", "attempt=a", "version=-1&attempt=a"):
        assert problem_of(client.post(f"{ADAPTER}?{query}", headers=AS_BYTES)).status == 422


@pytest.mark.req("WIRE-05", "WIRE-06")
def test_openapi_document_has_each_path_once_with_its_problems(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["paths"].keys() == {*GET_PATHS, *BODIES, *OTHERS}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            responses = operation["responses"]
            assert "200" in responses
            for status, response in responses.items():
                if int(status) >= 400:
                    assert list(response["content"]) == [PROBLEM_MEDIA_TYPE], (path, status)
    problems = document["paths"]["/infer/"]["post"]["responses"]["422"]["content"]
    assert set(problems[PROBLEM_MEDIA_TYPE]["schema"]["properties"]) == set(Problem.model_fields)


# --- limits of calls, sequences and answers


class SlowPool(Pool):
    """Each call waits for `may_end`, and then has no answers."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self.running, self.may_end = threading.Event(), threading.Event()

    async def infer(self, call: InferCall, record: CallRecord) -> list[RolloutEnvelope]:
        self.running.set()
        await asyncio.to_thread(self.may_end.wait, 60)
        return []


@pytest.mark.req("SRV-06", "DIST-05")
def test_a_generation_whose_connection_ended_counts_once() -> None:
    pool = SlowPool(settings(max_concurrent_calls=1))
    with served_client(create_app(pool)) as http:
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


@pytest.mark.req("SRV-06")
@asynchronous
async def test_the_deadline_of_a_body_ends_with_it_and_its_bytes_are_added_up() -> None:
    messages: asyncio.Queue[Any] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": b"a"})

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    limited = partial(BodyLimit(app, 1, 1.0), {"type": "http", "headers": []})
    call = asyncio.create_task(limited(messages.get, messages.put))
    await reached(messages.empty)
    Clock.skip()
    await asyncio.sleep(1e-6)
    messages.put_nowait({"type": "http.disconnect"})
    await call
    for _ in range(2):
        messages.put_nowait({"type": "http.request", "body": b"a", "more_body": True})
    with pytest.raises(HTTPException, match="413"):
        await limited(messages.get, messages.put)


class BrokenPool(Pool):
    async def infer(self, call: InferCall, record: CallRecord) -> list[RolloutEnvelope]:
        raise RuntimeError("secret")


@pytest.mark.req("WIRE-05")
def test_failure_is_an_internal_problem_that_ends_its_connection() -> None:
    with served_client(create_app(BrokenPool(settings()))) as http:
        for _ in range(3):  # the client would use the same connection again
            answer = http.post("/infer/", json={"infer_requests": [REQUEST]})
            problem = problem_of(answer)
            assert (problem.kind, problem.where) == ("internal", "POST /infer/")
            assert problem.detail == "RuntimeError; the server's log has the details"
            assert answer.headers["connection"] == "close"


class CountingPool(Pool):
    """Answers each call with one envelope. Its token is the number of the call."""

    calls = 0

    async def infer(self, call: InferCall, record: CallRecord) -> list[RolloutEnvelope]:
        self.calls += 1
        return [envelope([self.calls], [1])]


@pytest.mark.req("DIST-05", "WIRE-02")
def test_another_body_or_form_with_the_same_id_is_a_call_of_its_own() -> None:
    with client_of(CountingPool) as client:
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

    with client_of(max_requests_per_call=6) as few:
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
    for path in ("/infer/", *BODIES):
        problem = problem_of(client.post(path, content=ODD[name], headers=JSON))
        assert problem.status in (400, 422), (path, problem)
