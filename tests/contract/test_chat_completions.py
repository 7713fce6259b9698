"""Chat completions over HTTP, with an engine that repeats its prompt (OAI-01).

`test_openai.py` has vLLM and OpenAI's client.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from learner.rollout.server_process import free_ports
from rollout_server.engines import ENGINES
from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.preflight import bind

pytestmark = pytest.mark.req("OAI-01")

CHAT = "/v1/chat/completions"
PLACES = 2


@dataclass
class Served:
    """A server in a thread. http: its client. loop: of the server."""

    pool: Pool
    http: httpx.Client
    loop: list[Any] = field(default_factory=list)

    def ask(self, text: str = "a b c", **fields: Any) -> httpx.Response:
        return self.http.post(CHAT, json=call(text) | fields)

    @contextmanager
    def streaming(self, text: str = "a forever") -> Iterator[Iterator[str]]:
        """The lines of a stream that has begun."""
        with self.http.stream("POST", CHAT, json=call(text) | {"stream": True}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-weights-version"] == "0"
            lines = answer.iter_lines()
            assert next(lines) == "data: a"
            yield lines

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics/").text.splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
        return float(value)

    def wait_for(self, name: str, value: float) -> None:
        deadline = time.monotonic() + 60
        while self.metric(name) != value:
            assert time.monotonic() < deadline, (name, self.metric(name))
            time.sleep(0.01)


def call(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setitem(ENGINES, "scripted", "tests.contract.scripted_engine")
    settings = ServerSettings(
        model=Path("/m"), device="cpu", openai=True, max_concurrent_calls=PLACES
    )
    pool = Pool(settings, "scripted")
    (port,) = free_ports(1)
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
    served = Served(pool, http)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        served.loop.append(asyncio.get_running_loop())
        await pool.start()
        yield
        await pool.close()

    server = uvicorn.Server(uvicorn.Config(create_app(pool, lifespan), log_config=None))
    listener = bind("127.0.0.1", port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with http:
        yield served
    server.should_exit = True
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_an_answer_comes_whole_with_the_version_of_its_weights_and_is_counted(
    served: Served,
) -> None:
    answer = served.ask("one two three")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert (answer.json(), answer.headers["x-weights-version"]) == ("one two three", "0")
    assert served.metric("rollout_generated_tokens_total") == 3
    assert served.metric("rollout_requests_total") == 1
    assert served.metric('rollout_calls_total{outcome="answered"}') == 1
    models = served.http.get("/v1/models")
    assert models.json()["data"] == [{"id": "scripted"}]
    assert models.headers["x-weights-version"] == "0"


def test_a_stream_comes_event_by_event(served: Served) -> None:
    with served.streaming("a b c") as lines:
        assert [line for line in lines if line] == ["data: b", "data: c"]
    served.wait_for('rollout_calls_total{outcome="answered"}', 1)
    assert served.metric("rollout_generated_tokens_total") == 3


def test_both_routes_share_the_places_and_a_client_that_leaves_frees_its_own(
    served: Served,
) -> None:
    with served.streaming(), served.streaming():
        for path, body in ((CHAT, call("a")), ("/infer/", {"infer_requests": [call("a")]})):
            refused = served.http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error = served.ask().json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "too-many-calls")
    served.wait_for('rollout_calls_total{outcome="gone"}', PLACES)
    assert served.ask().status_code == 200
    assert served.metric("rollout_calls_in_flight") == 0


def test_what_breaks_a_stream_is_its_last_event(served: Served) -> None:
    with served.streaming() as lines:
        served.loop[0].call_soon_threadsafe(served.pool.stop_calls)
        error, done = [line for line in lines if line][-2:]
    assert done == "data: [DONE]"
    assert '"message": "server: the server is stopping"' in error
    assert '"code": "not-ready"' in error
    served.wait_for('rollout_calls_total{outcome="failed"}', 1)
    after = served.ask("a forever")
    assert (after.status_code, after.json()["error"]["type"]) == (503, "server_error")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"n": 5000}, "n"),
        ({"seed": -1}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"model": "m" * 5000}, "model"),
    ],
)
def test_a_bad_field_is_a_bad_request_that_names_it(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    answer = served.ask(**fields)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid-request")
    assert error["message"].startswith(f"{param}: ")
    assert error["type"] == "invalid_request_error"


def test_nulls_count_as_left_out(served: Served) -> None:
    assert served.ask(tools=None, temperature=None, model=None, metadata=None).status_code == 200


def test_errors_below_v1_have_openais_form_and_others_are_problems(served: Served) -> None:
    http = served.http
    answers = {
        404: http.get("/v1/embeddings"),
        405: http.get(CHAT),
        400: http.post(CHAT, content=b"{", headers={"content-type": "application/json"}),
        403: http.get("/v1/models", headers={"origin": "http://elsewhere.example"}),
    }
    for status, answer in answers.items():
        assert answer.status_code == status, answer.text
        assert set(answer.json()) == {"error"}
    assert http.get("/embeddings").json()["type"] == "urn:rollmatch:not-found"
