"""What pages of other sites send to a server on the operator's own machine, and get (SRV-06)."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem
from tests.browser import running_browser
from tests.contract.test_auth import listening

pytestmark = pytest.mark.req("SRV-06")

CLOSE = "/close_communicator/"
BODY = {"attempt": None}
REBOUND = "rebound.example"


def app_of(**options: Any) -> Any:
    """A server whose engines have not started: what passes the guards is answered 503 or 200."""
    return create_app(Pool(ServerSettings(model=Path("/m"), device="cpu", **options)))


def client_of(url: str = "http://127.0.0.1:8000", **options: Any) -> TestClient:
    return TestClient(app_of(**options), base_url=url)


def kind_of(answer: Any) -> str:
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
    return Problem.model_validate(answer.json()).kind


@pytest.mark.parametrize(
    "host",
    [
        *["127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LOCALHOST", "127.1.2.3", "10.0.0.1"],
        *["[::1]", "[::1]:8000", "server.example:443", "SERVER.example"],
    ],
)
def test_addresses_and_names_that_are_served_are_answered(host: str) -> None:
    client = client_of(allowed_hosts=("server.example",))
    assert client.get("/live/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *[REBOUND, f"{REBOUND}:8000", "localhost.example", "127.0.0.1.example", "0x7f.1", "a@b"],
        *["[::1].example", "127.0.0.1,localhost", "localhost:8000:1", "server.example."],
    ],
)
def test_another_name_is_not_served_on_loopback(host: str) -> None:
    client = client_of(allowed_hosts=("server.example",))
    answer = client.get("/live/", headers={"host": host})
    assert (answer.status_code, kind_of(answer)) == (421, "misdirected")
    assert "--allowed-host" in answer.json()["detail"]


def test_two_hosts_are_none() -> None:
    headers = [("host", "127.0.0.1"), ("host", "localhost")]
    assert client_of().get("/live/", headers=headers).status_code == 421


def test_every_name_is_served_where_a_token_is_needed() -> None:
    client = client_of(f"http://{REBOUND}", host="0.0.0.0")
    assert client.get("/live/").status_code == 200


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("origin", "http://evil.example"),
        ("origin", "http://127.0.0.1:9000"),
        ("origin", "null"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
    ],
)
def test_a_call_of_another_site_is_refused(header: str, value: str) -> None:
    answer = client_of().post(CLOSE, json=BODY, headers={header: value})
    assert (answer.status_code, kind_of(answer)) == (403, "foreign-origin")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"},
        {"origin": "https://127.0.0.1:8000"},
        {"sec-fetch-site": "none"},
    ],
)
def test_a_call_of_its_own_page_and_of_no_page_is_not(headers: dict[str, str]) -> None:
    assert kind_of(client_of().post(CLOSE, json=BODY, headers=headers)) == "not-ready"


@pytest.mark.parametrize("path", [CLOSE, "/infer/", "/update_weights/", "/keep_communicator/"])
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "a/b"])
def test_a_body_that_is_not_sent_as_json_is_refused(path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = client_of().post(path, content=b'{"attempt": null}', headers=headers)
    assert (answer.status_code, kind_of(answer)) == (400, "bad-request")


# --- in a browser


CALLS = """
async ([address, path]) => {
    const body = JSON.stringify({attempt: null});
    const json = {"content-type": "application/json"};
    const ways = {
        json: {body, headers: json},
        text: {body, mode: "no-cors"},
        form: {body: new URLSearchParams({attempt: "a"}), mode: "no-cors"},
        untyped: {body: new Blob([body]), mode: "no-cors"},
        read: {method: "GET"},
    };
    const told = {};
    for (const [way, options] of Object.entries(ways)) {
        const asked = way === "read" ? "/info/" : path;
        try {
            const answer = await fetch(address + asked, {method: "POST", ...options});
            told[way] = answer.type === "opaque" ? "opaque" : answer.status;
        } catch (error) {
            told[way] = error.name;
        }
    }
    return told;
}
"""


class Recorded:
    """The app, and the status of what was answered under each method."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.answers: list[tuple[str, int]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.answers.append((scope["method"], message["status"]))
            await send(message)

        await self.app(scope, receive, noted)


@contextmanager
def another_site() -> Iterator[str]:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<title>a page</title>")

        def log_message(self, format: str, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_page_of_another_site_can_do_nothing_through_a_browser() -> None:
    app = Recorded(app_of())
    with running_browser() as browser, another_site() as site, listening(app) as address:
        page = browser.new_page()
        page.goto(site)
        told = page.evaluate(CALLS, [address, CLOSE])
    assert told == {
        "json": "TypeError",  # not even asked: the server takes no preflight
        "text": "opaque",
        "form": "opaque",
        "untyped": "opaque",
        "read": "TypeError",
    }
    assert set(app.answers) == {("OPTIONS", 403), ("POST", 403), ("GET", 403)}


def test_a_name_that_is_pointed_at_the_server_reaches_nothing() -> None:
    app = Recorded(app_of())
    rule = f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"
    with running_browser(rule) as browser, listening(app) as address:
        page = browser.new_page()
        rebound = address.replace("127.0.0.1", REBOUND)
        answer = page.goto(f"{rebound}/live/")
        assert answer is not None
        assert json.loads(answer.body())["status"] == 421
        told = page.evaluate(CALLS, [rebound, CLOSE])
    assert {told["json"], told["read"]} == {421}
    assert {status for _, status in app.answers} == {421}


def test_the_servers_own_page_may_call_it() -> None:
    app = Recorded(app_of())
    with running_browser() as browser, listening(app) as address:
        page = browser.new_page()
        page.goto(f"{address}/docs/")
        told = page.evaluate(CALLS, [address, CLOSE])
    assert told == {"json": 503, "text": 400, "form": 400, "untyped": 400, "read": 200}
