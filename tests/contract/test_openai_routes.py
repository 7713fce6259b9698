"""OpenAI's routes of a server on scripted engines (OAI-01); test_openai.py has vLLM's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

from rollout_server.engines.engine_protocol import Engine
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import Problem
from tests.contract.running_server import samples
from tests.contract.scripted_engine import ScriptedEngine
from tests.contract.served_app import REQUEST, app_of, served_client, settings
from tests.unit.fleets import wait_until

CHAT = "/v1/chat/completions"
CALLS = 2


@dataclass
class Served:
    """http: a client of the server. engines: those of its start."""

    http: httpx.Client
    engines: dict[int, ScriptedEngine]

    def chat(self, text: str) -> httpx.Response:
        return self.http.post(CHAT, json={"text": text})

    @contextmanager
    def streaming(self, text: str = "a forever") -> Iterator[Iterator[str]]:
        """The pieces of a stream after its first one."""
        with self.http.stream("POST", CHAT, json={"text": text, "stream": "yes"}) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_text(1)
            assert next(pieces) == "a"
            yield pieces

    def metric(self, name: str) -> float:
        return samples(self.http.get("/metrics/").text)[name]

    def wait_for(self, name: str, value: float) -> None:
        wait_until(lambda: self.metric(name) == value)


@pytest.fixture
def served() -> Iterator[Served]:
    engines: dict[int, ScriptedEngine] = {}

    def build(_: ServerSettings, index: int) -> Engine:
        engine = ScriptedEngine(index)
        engines.setdefault(index, engine)
        return engine

    given = settings(replicas=2, openai=True, max_concurrent_calls=CALLS)
    with served_client(app_of(Pool(given, build))) as http:
        yield Served(http, engines)


@pytest.mark.req("OAI-01")
def test_chat_completion_is_counted(served: Served) -> None:
    assert served.chat("one two three").json() == ["one", "two", "three"]
    with served.streaming("a b c") as pieces:
        assert "".join(pieces) == "bc"
    served.wait_for("rollout_calls_total{outcome=answered}", 2)
    assert served.http.get("/v1/models/").json() == id(served.engines[0])


@pytest.mark.req("OAI-01")
def test_replicas_share_streams_infer_shares_their_limit_and_a_closed_stream_frees_its_place(
    served: Served,
) -> None:
    with served.streaming(), served.streaming():
        for replica in range(2):
            assert served.metric(f"rollout_running_sequences{{replica={replica}}}") == 1
        for path, body in ((CHAT, {"text": "a"}), ("/infer/", {"infer_requests": [REQUEST]})):
            refused = served.http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    served.wait_for("rollout_calls_total{outcome=gone}", CALLS)
    assert served.chat("a").status_code == 200
    assert served.metric("rollout_calls_in_flight") == 0


@pytest.mark.req("OAI-01")
def test_chat_completion_is_refused_as_a_call_of_infer(served: Served) -> None:
    http = served.http
    refused = [(404, http.get("/v1/embeddings")), (405, http.get(CHAT)), (503, served.chat("dead"))]
    assert http.post("/sleep/", json={}).status_code == 200
    refused.append((503, served.chat("a")))
    for status, answer in refused:
        assert (answer.status_code, Problem.model_validate(answer.json()).status) == (status,) * 2


@pytest.mark.req("OAI-01", "SRV-05")
def test_chat_completion_is_rendered_by_a_replica_that_is_alive(served: Served) -> None:
    assert served.chat("a").status_code == 200
    served.engines[0].alive = False
    assert served.chat("a").status_code == 200
    assert served.http.get("/v1/models").json() != id(served.engines[0])
