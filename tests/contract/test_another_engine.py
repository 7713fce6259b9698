"""A server on the scripted engine: push, and OpenAI's routes (OAI-01).

`test_openai.py` tests OpenAI's client with vLLM.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from learner.rollout.server_process import free_ports
from rollout_server.engines.engine_protocol import Engine
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import Problem
from tests.contract import scripted_engine
from tests.contract.scripted_engine import ScriptedEngine
from tests.contract.served_app import app_of, served_app
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import CALL, Sender, Weights, push, start, weight_group
from tests.unit.fleets import wait_until

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
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
        lines = self.http.get("/metrics/").text.splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
        return float(value)

    def wait_for(self, name: str, value: float) -> None:
        wait_until(lambda: self.metric(name) == value)


def call(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


# Its requests go to both replicas.
CALL_OF_ALL = {"infer_requests": [call("hello")] * 4}


@pytest.fixture
def served(tied: Path) -> Iterator[Served]:
    """A server with two scripted engines and OpenAI's routes."""
    settings = ServerSettings(
        model=tied, device="cpu", replicas=2, openai=True, max_concurrent_calls=CALLS
    )
    engines: dict[int, ScriptedEngine] = {}

    def build(settings: ServerSettings, index: int) -> Engine:
        engine = scripted_engine.build(settings, index)
        engines.setdefault(index, engine)
        return engine

    with (
        served_app(app_of(Pool(settings, build))) as (host, port),
        httpx.Client(base_url=f"http://{host}:{port}", timeout=60, trust_env=False) as http,
    ):
        assert http.get("/live/").status_code == 200  # after the lifespan's start
        yield Served(http, engines)


@pytest.mark.req("ARCH-01", "SYNC-03", "SYNC-04", "SYNC-05", "SYNC-07")
def test_engines_of_another_package_take_weights_and_are_built_again_after_a_broken_push(
    served: Served, tied: Path, other_tied: Path
) -> None:
    http, weights, others = served.http, read_weights(tied), read_weights(other_tied)
    assert_answers(served, {}, 0)
    with group(http) as sender:
        push(http, sender, weights, version=1)
        assert_answers(served, weights, 1)
        refused = start(http, 2, {"c": torch.ones(1)})
        assert Problem.model_validate(refused.json()).kind == "manifest-mismatch"
        assert_answers(served, weights, 1)
        assert start(http, 2, others).status_code == 200
        with closing(HTTPConnection(http.base_url.host, http.base_url.port or 80)) as learner:
            learner.request("POST", "/update_weights/", json.dumps(CALL), JSON)
            wait_until(lambda: served.engines[1].calls[-1] == "receive_weights")
        served.wait_for('rollout_weights_state{state="PUSH_NEEDED"}', 1)
    served.wait_for('rollout_replica_state{replica="1",state="needs-push"}', 1)
    for refused in (http.get("/health/"), http.post("/infer/", json=CALL_OF_ALL)):
        assert Problem.model_validate(refused.json()).status == 503
    with group(http) as sender:
        push(http, sender, others, version=2)
    assert_answers(served, others, 2)


def group(http: httpx.Client) -> AbstractContextManager[Sender]:
    (port,) = free_ports(1)
    return weight_group(http, port, world_size=3)


def assert_answers(served: Served, weights: Weights, version: int) -> None:
    """Every replica answers with these weights."""
    total = sum(float(weight.sum()) for weight in weights.values())
    for answer in served.http.post("/infer/", json=CALL_OF_ALL).json():
        assert answer["response"]["choices"][0]["message"]["content"] == f"{total:g} hello"
        assert answer["coordexp"]["weights_version"] == [version, version]


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
def test_chat_completion_is_counted(served: Served) -> None:
    assert served.chat("one two three").json() == ["one", "two", "three"]
    with served.streaming("a b c") as pieces:
        assert "".join(pieces) == "bc"
    served.wait_for('rollout_calls_total{outcome="answered"}', 2)
    assert served.http.get("/v1/models/").json() == id(served.engines[0])


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
