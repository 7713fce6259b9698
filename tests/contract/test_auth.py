"""The token and its sources, and the calls that a server on loopback refuses (SRV-06)."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.routing import Route

from rollout_server.settings.options import ServerSettings
from rollout_server.settings.preflight import check_access, is_loopback, read_token
from shared_contracts.errors import ContractError
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from tests.contract.served_app import client_of, problem_of, settings
from tests.unit.refusals import refused

pytestmark = pytest.mark.req("SRV-06")

TOKEN = "f00d-cafe_0123456789~"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
OPEN = {"/live", "/live/", "/health", "/health/"}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(f"{TOKEN}\n")
    return file


@pytest.fixture
def client(token_file: Path) -> Iterator[TestClient]:
    with client_of(token_file=token_file, openai=True) as client:
        yield client


def routes_of(client: TestClient) -> list[tuple[str, str]]:
    routes = client.app.routes  # type: ignore[attr-defined]
    assert all(isinstance(route, Route) for route in routes)
    return [
        (method, path)
        for route in routes
        for path in {route.path, route.path.rstrip("/")}
        for method in sorted(route.methods)
    ]


def is_refused(answer: Any) -> bool:
    """Whether the answer is 401; a 401 must be a problem without the token."""
    if answer.status_code != 401:
        return False
    assert answer.headers.get_list("www-authenticate") == ["Bearer"]
    if answer.request.method != "HEAD":
        assert problem_of(answer).kind == "unauthorized"
    assert TOKEN not in answer.text
    return True


def test_every_route_but_the_probes_needs_the_token(client: TestClient) -> None:
    routes = routes_of(client)
    paths = {path for _, path in routes}
    assert {"/infer/", "/infer", "/info/", "/openapi.json", "/docs/", "/v1/models"} | OPEN <= paths
    for method, path in routes:
        assert is_refused(client.request(method, path)) == (path not in OPEN), (method, path)
    for path in ("/", "/nothing", "/docs/x", "/live/x", "//infer/", "/INFER/", "/infer/%0A/x"):
        assert client.get(path).status_code == 404, path


def test_wrong_tokens_are_refused(client: TestClient) -> None:
    for given in (
        *("", "Bearer ", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"),
        *(f"Basic {TOKEN}", f"Bearer {TOKEN.upper()}", "Bearer \xff\xfe"),
    ):
        header = (b"Authorization", given.encode("latin-1"))
        assert is_refused(client.get("/info/", headers=[header])), given
    assert client.get("/info/", headers={"Authorization": f"bEARER {TOKEN}"}).status_code == 200
    twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer other")]
    for headers in (twice, twice[::-1]):
        assert is_refused(client.get("/info/", headers=headers))


@pytest.mark.req("WIRE-07")
def test_openapi_document_declares_the_token(client: TestClient) -> None:
    document = client.get("/openapi.json", headers=BEARER).json()
    assert document["components"]["securitySchemes"] == {
        "token": {"type": "http", "scheme": "bearer"}
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("401" in operation["responses"]) == (path not in OPEN)
            assert operation.get("security") == (None if path in OPEN else [{"token": []}])


@pytest.mark.req("SRV-08")
def test_answers_logs_and_reprs_do_not_show_the_token(
    client: TestClient, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for method, path in routes_of(client):
        for headers in (BEARER, {"Authorization": f"Bearer {TOKEN}x"}):
            assert TOKEN not in client.request(method, path, headers=headers).text
    token = read_token(settings(token_file=token_file), {})
    shown = f"{token!r} {token} {client.app.user_middleware!r}"  # type: ignore[attr-defined]
    assert TOKEN not in shown
    assert TOKEN not in caplog.text


# --- sources of the token


@pytest.mark.req("DEP-01")
def test_token_comes_from_the_file_or_the_environment(token_file: Path) -> None:
    def read(file: Path | None, **environment: str) -> str | None:
        token = read_token(settings(token_file=file), environment)
        return None if token is None else token.get_secret_value()

    named = {TOKEN_FILE_VARIABLE: str(token_file)}
    assert read(None) is None
    assert read(token_file) == TOKEN
    assert read(None, ROLLOUT_SERVER_TOKEN=f" {TOKEN}\r\n") == TOKEN
    assert read(token_file, ROLLOUT_SERVER_TOKEN=TOKEN, **named) == TOKEN


@pytest.mark.req("SRV-04")
@pytest.mark.parametrize("content", [b" \n", b"two words", "gro\u00df".encode(), b"\xff"])
def test_token_that_no_header_can_carry_is_refused(token_file: Path, content: bytes) -> None:
    token_file.write_bytes(content)
    with pytest.raises(ContractError) as error:
        check_access(settings(token_file=token_file), {})
    assert error.value.where == "token_file"
    assert "two words" not in str(error.value)


@pytest.mark.req("SRV-04")
def test_missing_and_contradicting_tokens_are_refused(token_file: Path, tmp_path: Path) -> None:
    file, gone = settings(token_file=token_file), settings(token_file=tmp_path / "gone")
    named, other = {TOKEN_FILE_VARIABLE: str(token_file)}, {TOKEN_VARIABLE: "other-word"}
    cases: list[tuple[ServerSettings, dict[str, str], str, str]] = [
        (settings(), {TOKEN_VARIABLE: ""}, TOKEN_VARIABLE, "empty"),
        (gone, {}, "token_file", "cannot be read"),
        (settings(), {TOKEN_FILE_VARIABLE: "/gone"}, TOKEN_FILE_VARIABLE, "cannot be read"),
        (file, other, "token_file", "another token"),
        (settings(), named | other, TOKEN_FILE_VARIABLE, f"another token than {TOKEN_VARIABLE}"),
    ]
    for given, environment, where, found in cases:
        with pytest.raises(ContractError, match=found) as error:
            check_access(given, environment)
        assert error.value.where == where
        assert TOKEN not in str(error.value)
        assert "other-word" not in str(error.value)


# --- addresses and hosts


def test_address_beyond_loopback_needs_a_token() -> None:
    for host in ("0.0.0.0", "::", "", "192.168.0.7", "fe80::1", "gpu-box", "127.evil"):
        with refused("--host", "no token"):
            check_access(settings(host=host), {})
        check_access(settings(host=host), {TOKEN_VARIABLE: TOKEN})
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host)
        check_access(settings(host=host), {})
    assert settings().host == "127.0.0.1"


def refusal_of(answer: Any) -> tuple[int, str]:
    problem = problem_of(answer)
    return problem.status, problem.kind


@pytest.mark.parametrize("listens", ["127.0.0.1", "10.0.0.7"])
def test_only_addresses_and_allowed_hosts_are_served(listens: str) -> None:
    """A name of another site can resolve to 127.0.0.1. Elsewhere the list is needed."""
    with client_of(host=listens, allowed_hosts=("server.example",)) as client:
        for host in (listens, "127.0.0.1:8000", "LOCALHOST", "[::1]:8000", "SERVER.example:443"):
            assert client.get("/live/", headers={"host": host}).status_code == 200, host
        for host in ("evil.example:8000", "localhost.example", "10.0.0.1", "0.0.0.0", "a@b", ""):
            answer = client.get("/live/", headers={"host": host})
            assert refusal_of(answer) == (421, "misdirected"), host
            assert "--allowed-host" in answer.json()["detail"]
    for host, status in (("0.0.0.0", 200), ("127.0.0.1", 421)):
        with client_of(host=host) as client:
            assert client.get("/live/", headers={"host": "any.example"}).status_code == status


CLOSE = "/close_communicator/"


def test_call_that_is_not_sent_as_json_is_refused() -> None:
    """A page of another site can send it without a question to the server (CORS)."""
    with client_of() as client:
        for json in ("application/json; charset=utf-8", "Application/vnd.own+JSON"):
            own = client.post(CLOSE, content=b'{"attempt": "a"}', headers={"content-type": json})
            assert refusal_of(own) == (503, "not-ready")
        for path in (CLOSE, "/infer/", "/load_adapter/?version=1&attempt=a"):
            assert refusal_of(client.options(path)) == (405, "method-not-allowed")
            for kind in (None, "text/plain; as=json", "application/x-www-form-urlencoded"):
                headers = {} if kind is None else {"content-type": kind}
                answer = client.post(path, content=b'{"attempt": "a"}', headers=headers)
                assert refusal_of(answer) == (400, "bad-request"), (path, kind)
