"""Routes, probes and problem documents, without an engine behind them."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from rollout_server.serving.pool import Pool
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem
from tests.contract.test_limits import client_of, problem_of, settings

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
ADAPTER, AS_BYTES = "/load_adapter/", {"content-type": "application/octet-stream"}
OTHERS = ("/infer/", ADAPTER, "/sleep/", "/wake_up/")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A client of a server whose engines have not started."""
    with client_of(Pool(settings(replicas=3))) as client:
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
    invalid = client.post("/infer/", content=b"{", headers={"content-type": "application/json"})
    assert problem_of(invalid).type == "urn:rollmatch:bad-request"
    line_feed = client.post("/infer/%0A", json={"infer_requests": []})
    assert problem_of(line_feed).type == "urn:rollmatch:not-ready"


@pytest.mark.req("WIRE-05")
def test_malformed_requests_are_named_with_their_indices(client: TestClient) -> None:
    message = {"role": "user", "content": "x"}
    body = {
        "infer_requests": [
            {"messages": [message]},
            {"messages": [message], "surprise": 1},
            {"messages": []},
            {"messages": [message], "videos": ["a.mp4"]},
        ],
        "request_config": {"top_p": 0.0},
    }
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
