"""The token: where it comes from, which routes want it, and that nothing tells it."""

import asyncio
import base64
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from playwright.sync_api import expect
from starlette.routing import Route
from starlette.types import Message, Scope

from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.preflight import check_access, is_loopback, read_token
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, ContractError, Problem
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from tests.browser import running_browser

TOKEN = "f00d-cafe_0123456789~"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
OPEN = {"/live", "/live/", "/health", "/health/"}


def settings(**options: Any) -> ServerSettings:
    return ServerSettings(model=Path("/m"), device="cpu", **options)


@contextmanager
def client_of(**options: Any) -> Iterator[TestClient]:
    """A server whose engines have not started."""
    app = create_app(Pool(settings(**options)))
    with TestClient(
        app, base_url="http://127.0.0.1", follow_redirects=False, raise_server_exceptions=False
    ) as client:
        yield client


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(f"{TOKEN}\n")
    return file


@pytest.fixture
def client(token_file: Path) -> Iterator[TestClient]:
    """Of a server with a token."""
    with client_of(token_file=token_file) as client:
        yield client


def routes_of(client: TestClient) -> list[tuple[str, str]]:
    """Every (method, path) the app serves."""
    routes = client.app.routes  # type: ignore[attr-defined]
    assert all(isinstance(route, Route) for route in routes)
    return [(method, route.path) for route in routes for method in sorted(route.methods)]


def is_refused(answer: Any) -> bool:
    """Whether it is the 401 of a missing token, which must be a whole problem."""
    if answer.status_code != 401:
        return False
    page = answer.request.url.path.startswith(("/docs", "/openapi.json"))
    schemes = [challenge.split()[0] for challenge in answer.headers.get_list("www-authenticate")]
    assert schemes == (["Basic", "Bearer"] if page else ["Bearer"])
    if answer.request.method != "HEAD":
        assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
        assert Problem.model_validate(answer.json()).type == "urn:rollmatch:unauthorized"
    assert TOKEN not in answer.text
    return True


@pytest.mark.req("SRV-06")
def test_with_a_token_every_route_but_the_probes_of_life_wants_it(client: TestClient) -> None:
    routes = routes_of(client)
    paths = {path for _, path in routes}
    pages = {"/openapi.json", "/docs", "/docs/", "/docs/swagger-ui.css"}
    assert {"/infer/", "/infer", "/metrics/", "/info/"} | pages | OPEN <= paths
    for method, path in routes:
        assert is_refused(client.request(method, path)) == (path not in OPEN), (method, path)
        answer = client.request(method, path, headers=BEARER)
        assert answer.status_code in (200, 400, 503), (method, path)


@pytest.mark.req("SRV-06")
def test_without_a_token_no_route_wants_one() -> None:
    with client_of() as client:
        for method, path in routes_of(client):
            assert client.request(method, path).status_code in (200, 400, 503), (method, path)


@pytest.mark.req("SRV-06")
def test_what_is_not_there_wants_it_too(client: TestClient) -> None:
    for path in ("/", "/nothing", "/docs/x", "/live/x", "//live/", "/LIVE/"):
        assert is_refused(client.get(path)), path
        assert client.get(path, headers=BEARER).status_code == 404
    assert is_refused(client.delete("/infer/"))
    assert client.delete("/infer/", headers=BEARER).status_code == 405


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        f"Bearer x {TOKEN}",
        f"Bearer {TOKEN}, Bearer {TOKEN}",
        "Bearer \xff\xfe",
    ],
)
def test_another_token_is_none(client: TestClient, given: str) -> None:
    header = (b"Authorization", given.encode("latin-1"))
    assert is_refused(client.get("/info/", headers=[header]))


@pytest.mark.req("SRV-06")
def test_the_scheme_is_read_in_any_case_and_given_once(client: TestClient) -> None:
    assert client.get("/info/", headers={"Authorization": f"bEARER {TOKEN}"}).status_code == 200
    twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer other")]
    assert is_refused(client.get("/info/", headers=twice))


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}


@pytest.mark.req("SRV-06")
def test_a_browser_sends_the_token_as_a_password_to_the_pages_and_nowhere_else(
    client: TestClient,
) -> None:
    for method, path in routes_of(client):
        if path in OPEN:
            continue
        page = path.startswith(("/docs", "/openapi.json"))
        for user in ("", "anybody"):
            refused = is_refused(client.request(method, path, headers=basic(user, TOKEN)))
            assert refused != page, (method, path)
        for headers in (basic(TOKEN, ""), basic("", f"{TOKEN}x"), {"Authorization": "Basic !"}):
            assert is_refused(client.request(method, path, headers=headers)), (method, path)


@pytest.mark.req("SRV-06", "WIRE-07")
@pytest.mark.parametrize("path", ["/docs", "/docs/"])
def test_a_person_tries_a_call_in_a_browser(client: TestClient, path: str) -> None:
    """Every file of the page comes from the server, which asks for the token in two ways."""
    asked: list[str] = []
    with running_browser() as browser, listening(client.app) as address:
        sent = {"username": "anybody", "password": TOKEN}
        page = browser.new_context(http_credentials=sent).new_page()  # type: ignore[arg-type]
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}{path}")
        call = page.locator(".opblock", has_text="/info/")
        call.click()
        call.get_by_text("Try it out").click()
        call.get_by_text("Execute").click()
        answered = call.locator(".live-responses-table tbody .response-col_status")
        assert answered.inner_text().split()[0] == "401"
        page.locator(".auth-wrapper .authorize").first.click()
        page.locator(".auth-container input").fill(TOKEN)
        page.locator(".auth-container button.authorize").click()
        page.locator(".auth-container .btn-done").click()
        call.get_by_text("Execute").click()
        expect(answered).to_contain_text("200")
    assert len(asked) > 4
    assert all(url.startswith(f"{address}/") for url in asked)


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The app behind a real port of its own; its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.req("SRV-06")
def test_a_body_is_not_read_without_the_token(client: TestClient) -> None:
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/infer/",
        "query_string": b"",
        "headers": [(b"content-length", b"1000000000000")],
    }
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(client.app(scope, receive, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 401


@pytest.mark.req("SRV-06", "WIRE-07")
def test_the_openapi_document_says_where_the_token_is_wanted(client: TestClient) -> None:
    document = client.get("/openapi.json", headers=BEARER).json()
    assert document["components"]["securitySchemes"] == {
        "token": {"type": "http", "scheme": "bearer"}
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("401" in operation["responses"]) == (path not in OPEN)
            assert operation.get("security") == (None if path in OPEN else [{"token": []}])
    with client_of() as without:
        told = without.get("/openapi.json").text
    assert "security" not in told
    assert '"401"' not in told


@pytest.mark.req("SRV-06", "SRV-08")
def test_nothing_tells_the_token(
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


# --- where it comes from


@pytest.mark.req("SRV-06")
def test_it_is_read_from_the_file_or_from_the_environment(token_file: Path) -> None:
    def read(file: Path | None, **environment: str) -> str | None:
        token = read_token(settings(token_file=file), environment)
        return None if token is None else token.get_secret_value()

    assert read(None) is None
    assert read(token_file) == TOKEN
    assert read(None, ROLLOUT_SERVER_TOKEN=f" {TOKEN}\r\n") == TOKEN
    assert read(token_file, ROLLOUT_SERVER_TOKEN=TOKEN) == TOKEN


@pytest.mark.req("SRV-06")
def test_the_environment_alone_guards_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with client_of() as client:
        assert is_refused(client.get("/info/"))
        assert client.get("/info/", headers=BEARER).status_code == 200


@pytest.mark.req("SRV-04", "SRV-06")
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "empty"),
        (b" \n\t", "empty"),
        (b"two words", "white space"),
        (b"two\nlines", "white space"),
        ("gro\u00df".encode(), "characters"),
        (b"a\0b", "characters"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_token_no_header_can_carry_is_refused(
    token_file: Path, content: bytes, found: str
) -> None:
    token_file.write_bytes(content)
    with pytest.raises(ContractError, match=found) as error:
        check_access(settings(token_file=token_file), {})
    assert error.value.where == "token_file"
    if content.strip() and b"\0" not in content and content.isascii():
        assert content.decode() not in str(error.value)
        with pytest.raises(ContractError, match=found):
            check_access(settings(), {TOKEN_VARIABLE: content.decode()})


@pytest.mark.req("SRV-04", "SRV-06")
def test_an_empty_variable_is_an_error_and_not_an_open_door() -> None:
    with pytest.raises(ContractError, match="empty") as error:
        check_access(settings(), {TOKEN_VARIABLE: ""})
    assert error.value.where == TOKEN_VARIABLE


@pytest.mark.req("SRV-04", "SRV-06")
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(ContractError, match="cannot be read"):
            check_access(settings(token_file=path), {})


@pytest.mark.req("SRV-04", "SRV-06")
def test_two_tokens_that_differ_are_refused_and_not_shown(token_file: Path) -> None:
    with pytest.raises(ContractError, match="another token") as error:
        check_access(settings(token_file=token_file), {TOKEN_VARIABLE: "other-word"})
    assert TOKEN not in str(error.value)
    assert "other-word" not in str(error.value)


@pytest.mark.req("SRV-06", "DEP-01")
def test_the_environment_may_name_the_file(token_file: Path) -> None:
    environment = {TOKEN_FILE_VARIABLE: str(token_file)}
    token = read_token(settings(), environment)
    assert token is not None
    assert token.get_secret_value() == TOKEN
    assert read_token(settings(token_file=token_file), {**environment, TOKEN_VARIABLE: TOKEN})
    with pytest.raises(ContractError, match=f"another token than {TOKEN_VARIABLE}") as error:
        read_token(settings(), {**environment, TOKEN_VARIABLE: "other-word"})
    assert error.value.where == TOKEN_FILE_VARIABLE
    with pytest.raises(ContractError, match="cannot be read") as error:
        check_access(settings(), {TOKEN_FILE_VARIABLE: f"{token_file}.gone"})
    assert error.value.where == TOKEN_FILE_VARIABLE


@pytest.mark.req("SRV-06")
def test_a_file_others_may_read_is_warned_of(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_access(settings(token_file=token_file), {})
    assert caplog.messages == []
    token_file.chmod(0o640)
    check_access(settings(token_file=token_file), {})
    (message,) = caplog.messages
    assert "other users can read" in message


# --- addresses


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "192.168.0.7", "8.8.8.8", "fe80::1", "gpu-box", "127.evil"]
)
def test_an_address_others_can_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ContractError, match="no token") as error:
        check_access(settings(host=host), {})
    assert error.value.where == "--host"
    check_access(settings(host=host), {TOKEN_VARIABLE: TOKEN})


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machines_own_address_needs_none(host: str) -> None:
    assert is_loopback(host)
    check_access(settings(host=host), {})


@pytest.mark.req("SRV-06")
def test_unless_told_otherwise_only_this_machine_can_reach_it() -> None:
    assert settings().host == "127.0.0.1"
