"""A server on the scripted engine: registry, push, and OpenAI's routes (OAI-01).

`test_openai.py` tests OpenAI's client with vLLM.
"""

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from learner.rollout.server_process import free_ports
from rollout_server.engines import ENGINES
from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import Problem
from tests.contract.scripted_engine import ScriptedEngine
from tests.contract.served_app import served_app
from tests.contract.weight_sender import push, start, weight_group

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
CALLS = 2


@dataclass
class Served:
    """http: a client of the server. engines: those of its start."""

    http: httpx.Client
    engines: list[ScriptedEngine]

    def infer(self, text: str) -> dict[str, Any]:
        (envelope,) = self.http.post("/infer/", json={"infer_requests": [call(text)]}).json()
        return dict(envelope)

    def chat(self, text: str) -> httpx.Response:
        return self.http.post(CHAT, json={"text": text})

    @contextmanager
    def streaming(self, text: str = "a forever") -> Iterator[Iterator[str]]:
        """The pieces of a stream after its first one."""
        with self.http.stream("POST", CHAT, json={"text": text, "stream": "yes"}) as answer:
            assert (answer.status_code, answer.headers["x-weights-version"]) == (200, "0")
            pieces = answer.iter_text(1)
            assert next(pieces) == "a"
            yield pieces

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
    """A server with two scripted engines and OpenAI's routes."""
    monkeypatch.setitem(ENGINES, "scripted", "tests.contract.scripted_engine")
    settings = ServerSettings(
        model=Path("/m"), device="cpu", replicas=2, openai=True, max_concurrent_calls=CALLS
    )
    pool = Pool(settings, "scripted")
    engines: list[Any] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pool.start()
        engines.extend(await pool.serving())
        yield
        await pool.close()

    with (
        served_app(create_app(pool, lifespan)) as (host, port),
        httpx.Client(base_url=f"http://{host}:{port}", timeout=60, trust_env=False) as http,
    ):
        assert http.get("/live/").status_code == 200  # after the lifespan's start
        yield Served(http, engines)


@pytest.mark.req("ARCH-01")
def test_engine_of_another_package_answers_and_takes_weights(served: Served) -> None:
    http = served.http
    assert http.get("/health/").status_code == 200
    before = served.infer("hello")
    assert before["response"]["choices"][0]["message"]["content"] == "0 hello"
    (port,) = free_ports(1)
    weights = {"a": torch.full((2, 3), 1.5), "b": torch.ones(4)}
    with weight_group(http, port, world_size=3) as sender:
        assert push(http, sender, weights, version=1)["verified"] == 2
        refused = start(http, 2, {"c": torch.ones(1)})
        assert Problem.model_validate(refused.json()).kind == "manifest-mismatch"
    after = served.infer("hello")
    assert after["response"]["choices"][0]["message"]["content"] == "13 hello"
    assert after["coordexp"]["weights_version"] == [1, 1]


@pytest.mark.req("ARCH-01")
def test_server_modules_do_not_import_vllm() -> None:
    program = """
import sys
import rollout_server.engines.vllm, rollout_server.http.app, rollout_server.serve
print(*[name for name in sys.modules if name.partition(".")[0] == "vllm"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.req("OAI-01")
def test_chat_completion_has_the_weights_version_and_is_counted(served: Served) -> None:
    answer = served.chat("one two three")
    assert (answer.json(), answer.headers["x-weights-version"]) == (["one", "two", "three"], "0")
    with served.streaming("a b c") as pieces:
        assert "".join(pieces) == "bc"
    served.wait_for('rollout_calls_total{outcome="answered"}', 2)
    models = served.http.get("/v1/models/")
    assert (models.json(), models.headers["x-weights-version"]) == (id(served.engines[0]), "0")


@pytest.mark.req("OAI-01")
def test_replicas_share_streams_infer_shares_their_limit_and_a_closed_stream_frees_its_place(
    served: Served,
) -> None:
    with served.streaming(), served.streaming():
        for replica in range(2):
            assert served.metric(f'rollout_running_sequences{{replica="{replica}"}}') == 1
        for path, body in ((CHAT, {"text": "a"}), ("/infer/", {"infer_requests": [call("a")]})):
            refused = served.http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    served.wait_for('rollout_calls_total{outcome="gone"}', CALLS)
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
