"""Bounds of bodies, calls and sequences; and bodies no client of good will sends."""

import asyncio
import http.client
import json
import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from rollout_server.http.app import create_app
from rollout_server.http.bodies import MAX_FAULTS
from rollout_server.http.middleware import MOST_OTHER_BYTES, Places
from rollout_server.http.problems import RETRY_AFTER_S
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import CallRecord
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem, ProblemError
from shared_contracts.infer import MAX_FIELDS, MAX_REQUESTS, InferCall, RolloutEnvelope

MAX_BODY = 1000
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


def client_of(**options: Any) -> TestClient:
    """A server whose engines have not started."""
    return TestClient(
        create_app(Pool(settings(**options))),
        base_url="http://127.0.0.1",
        raise_server_exceptions=False,
    )


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of() as client:
        yield client


@pytest.fixture(scope="module")
def narrow() -> Iterator[TestClient]:
    """A server that takes small bodies only."""
    with client_of(max_body_mib=MAX_BODY / 2**20) as client:
        yield client


def problem_of(answer: Any) -> Problem:
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
    problem = Problem.model_validate(answer.json())
    assert problem.status == answer.status_code
    return problem


def of_size(size: int) -> bytes:
    """A call without requests, padded to `size` bytes."""
    return b'{"infer_requests":[]}'.ljust(size)


# --- bytes


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize("path", POST_PATHS)
def test_a_body_larger_than_the_bound_is_refused(narrow: TestClient, path: str) -> None:
    assert narrow.post(path, content=of_size(MAX_BODY), headers=JSON).status_code in (422, 503)
    for body in (of_size(MAX_BODY + 1), iter([of_size(MAX_BODY), b" "])):
        problem = problem_of(narrow.post(path, content=body, headers=JSON))
        assert problem.type == "urn:rollmatch:body-too-large"
        assert "max_body_mib" in problem.detail


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize("path", POST_PATHS[1:])
def test_only_calls_with_images_may_be_large(client: TestClient, path: str) -> None:
    large = b"{}".ljust(MOST_OTHER_BYTES)
    assert client.post(path, content=large, headers=JSON).status_code in (422, 503)
    for body in (large + b" ", iter([large, b" "])):
        problem = problem_of(client.post(path, content=body, headers=JSON))
        assert (problem.type, "16 MiB" in problem.detail) == ("urn:rollmatch:body-too-large", True)
    called = client.post("/infer/", content=of_size(MOST_OTHER_BYTES + 1), headers=JSON)
    assert called.status_code == 422, "it is read, and has too much beside its requests"


@pytest.mark.req("SRV-06", "WIRE-05")
def test_the_bodies_of_all_calls_have_a_bound_together() -> None:
    pool = SlowPool(settings(max_bodies_mib=1.5 * MAX_BODY / 2**20))
    app = create_app(pool)
    with TestClient(app, base_url="http://127.0.0.1") as client, ThreadPoolExecutor() as callers:
        first = callers.submit(client.post, "/infer/", content=of_size(MAX_BODY), headers=JSON)
        assert pool.running.wait(20)
        for path in POST_PATHS:
            problem = problem_of(client.post(path, content=of_size(MAX_BODY), headers=JSON))
            assert (problem.status, problem.kind) == (503, "overloaded"), path
            assert "max_bodies_mib" in problem.detail
        pool.may_end.set()
        assert first.result().status_code == 200
        assert client.post("/infer/", content=of_size(MAX_BODY), headers=JSON).status_code == 200


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """A real server on a socket, that takes small bodies only."""
    bounds = settings(max_body_mib=MAX_BODY / 2**20)
    app = create_app(Pool(bounds))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join()


def read_problem(connection: http.client.HTTPConnection) -> Problem:
    answer = connection.getresponse()
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
    return Problem.model_validate_json(answer.read())


@pytest.mark.req("SRV-06")
def test_an_announced_body_is_refused_before_it_is_sent(address: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.putrequest("POST", "/infer/")
    connection.putheader("Content-Length", str(10**15))
    connection.endheaders()
    assert read_problem(connection).status == 413
    connection.close()


@pytest.mark.req("SRV-06")
def test_an_endless_body_is_refused_while_it_is_sent(address: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.putrequest("POST", "/infer/")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    for _ in range(3):
        connection.send(b"200\r\n" + b" " * 512 + b"\r\n")
    assert read_problem(connection).status == 413
    connection.close()


# --- calls at once


@pytest.mark.req("SRV-06")
def test_one_call_too_many_is_refused_until_another_ends() -> None:
    places = Places(2)
    with places.take():
        with places.take():
            for refused in (places.require_one, places.take().__enter__):
                with pytest.raises(ProblemError) as error:
                    refused()
                assert error.value.problem.kind == "too-many-calls"
        places.require_one()


class SlowPool(Pool):
    """Its calls run until they may end."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self.running, self.may_end = threading.Event(), threading.Event()

    async def infer(self, call: InferCall, record: CallRecord) -> list[RolloutEnvelope]:
        self.running.set()
        await asyncio.to_thread(self.may_end.wait, 20)
        return []


@pytest.mark.req("SRV-06")
def test_a_call_too_many_is_told_when_to_try_again() -> None:
    pool = SlowPool(settings(max_concurrent_calls=1))
    with (
        TestClient(create_app(pool), base_url="http://127.0.0.1") as client,
        ThreadPoolExecutor() as threads,
    ):
        first = threads.submit(client.post, "/infer", json={"infer_requests": []})
        assert pool.running.wait(20)
        answer = client.post("/infer/", json={"infer_requests": []})
        assert problem_of(answer).status == 429
        assert answer.headers["Retry-After"] == str(RETRY_AFTER_S)
        assert client.get("/live/").status_code == 200
        pool.may_end.set()
        assert first.result().status_code == 200
        assert client.post("/infer/", json={"infer_requests": []}).status_code == 200


# --- sequences


@pytest.mark.req("SRV-06")
def test_a_call_of_too_many_requests_or_sequences_is_refused() -> None:
    def told(client: TestClient, requests: int, n: int) -> tuple[int, str]:
        call = {"infer_requests": [REQUEST] * requests, "request_config": {"n": n}}
        problem = problem_of(client.post("/infer/", json=call))
        return problem.status, problem.where

    with client_of(max_requests_per_call=6) as client:
        assert told(client, 6, 1) == (503, "replicas")
        assert told(client, 3, 2) == (503, "replicas")
        assert told(client, 7, 1) == (422, "infer_requests")
        assert told(client, 3, 3) == (422, "request_config.n")
        assert told(client, 1, 10**30) == (422, "request_config.n")


@pytest.mark.req("SRV-06", "WIRE-05")
def test_faults_without_number_make_a_short_answer(client: TestClient) -> None:
    many = 10 * MAX_REQUESTS
    fields = {f"field{number}": 1 for number in range(MAX_FIELDS + 1)}
    for body in (
        {"infer_requests": [1] * many},
        {"infer_requests": [REQUEST | {"images": [1] * many}]},
        {"infer_requests": [{"messages": [1] * many}]},
        {"infer_requests": [{"messages": [{"role": "user", "content": [1] * many}]}]},
        {"infer_requests": [], "request_config": {"stop": [1] * many}},
        {"infer_requests": [], **fields},
        {"infer_requests": [REQUEST | fields]},
        {"infer_requests": [REQUEST | {"k" * 10**6: 1}]},
    ):
        answer = client.post("/infer/", json=body)
        assert problem_of(answer).status == 422
        # Each of the first MAX_FAULTS requests that are no object is named.
        named = body["infer_requests"] == [1] * many
        assert len(answer.content) < (140 * MAX_FAULTS if named else 2000)
    assert client.post("/update_weights/", json={"parameters": [1] * many}).status_code == 422


@pytest.mark.req("SRV-06", "WIRE-07")
def test_the_openapi_document_declares_the_bounds(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    for path in POST_PATHS:
        assert "413" in paths[path]["post"]["responses"]
    assert "429" in paths["/infer/"]["post"]["responses"]


# --- odd bodies


def in_call(text: str) -> bytes:
    return b'{"infer_requests":[%s]%s}' % (json.dumps(REQUEST).encode(), text.encode())


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


ODD: dict[str, bytes] = {
    "an endless list": b"[" * 10**5,
    "a deep list": nested(10**5).encode(),
    "deep objects": b'{"a":' * 10**5,
    "a deep value in a field": in_call(f',"request_config":{nested(5000)}'),
    "a deep value in a field nobody serves": in_call(f',"metrics":{nested(900)}'),
    "a number of many digits": in_call(f',"expected_weights_version":{"9" * 5000}'),
    "a negative of many digits": in_call(f',"expected_weights_version":-{"9" * 4000}'),
    "more than 32 bits": in_call(',"request_config":{"top_k":2147483648}'),
    "more than 64 bits": in_call(f',"request_config":{{"seed":{2**64}}}'),
    "not a number": in_call(',"request_config":{"temperature":NaN}'),
    "infinity": in_call(',"request_config":{"temperature":-Infinity}'),
    "a float without bound": in_call(',"request_config":{"temperature":1e999}'),
    "not a number where null belongs": in_call(',"metrics":NaN'),
    "half a pair as a key": b'{"\\ud800":1}',
    "half a pair in an id": in_call(',"request_id":"\\ud800"'),
    "half a pair in a stop string": in_call(',"request_config":{"stop":["\\udfff"]}'),
    "half a pair in a prompt": b'{"infer_requests":[{"messages":'
    b'[{"role":"user","content":"\\ud800"}]}]}',
    "half a pair in a path": b'{"infer_requests":[{"messages":'
    b'[{"role":"user","content":"<image>"}],"images":["/\\ud800"]}]}',
    "bytes that are no UTF-8": b'{"infer_requests":["\xff"]}',
    "a key twice, the second wrong": b'{"infer_requests":[],"infer_requests":1}',
    "nothing": b"",
    "null": b"null",
    "a number": b"1",
    "text": b'"x"',
    "a zero byte": b"\0",
    "two documents": b'{"infer_requests":[]}{}',
    "a pickle": pickle.dumps({"infer_requests": []}),
}


@pytest.mark.req("WIRE-05", "WIRE-07")
@pytest.mark.parametrize("name", ODD)
def test_an_odd_body_is_the_callers_fault(client: TestClient, name: str) -> None:
    for path in POST_PATHS:
        problem = problem_of(client.post(path, content=ODD[name], headers=JSON))
        assert problem.status in (400, 422), (path, problem)


@pytest.mark.req("SRV-06")
def test_no_other_kind_of_body_is_read(client: TestClient) -> None:
    """Least of all a pickle, whatever it is called."""
    bodies = pickle.dumps({"infer_requests": []}), b'{"infer_requests":[]}'
    for kind in (
        "application/octet-stream",
        "application/x-pickle",
        "application/python-pickle",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "text/plain",
        "",
    ):
        for body in bodies:
            answer = client.post("/infer/", content=body, headers={"Content-Type": kind})
            assert problem_of(answer).status == 400, kind


@pytest.mark.req("WIRE-05")
def test_odd_queries_and_headers_are_the_callers_fault(client: TestClient) -> None:
    for query in ("envelope=2", "envelope=", "envelope=%ff", "envelope=%00"):
        answer = client.post(f"/infer/?{query}", json={"infer_requests": []})
        assert problem_of(answer).status == 422, query
    odd = {"Rollout-Envelope": "perhaps"}
    answer = client.post("/infer/", json={"infer_requests": []}, headers=odd)
    assert problem_of(answer).status == 422
