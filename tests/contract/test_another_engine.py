"""Another engine, through the registry: it answers over HTTP and takes a push."""

import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn
from fastapi import FastAPI

from learner.rollout.server_process import free_ports
from rollout_server.engines import ENGINES
from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.preflight import bind
from shared_contracts.errors import Problem
from tests.contract.weight_sender import push, start, weight_group

ROOT = Path(__file__).parents[2]
CALL = {"infer_requests": [{"messages": [{"role": "user", "content": "hello"}]}]}


@pytest.fixture
def scripted_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A client of a server whose two replicas are scripted engines."""
    monkeypatch.setitem(ENGINES, "scripted", "tests.contract.scripted_engine")
    pool = Pool(ServerSettings(model=Path("/m"), device="cpu", replicas=2), "scripted")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pool.start()
        yield
        await pool.close()

    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(create_app(pool, lifespan), log_config=None))
    listener = bind("127.0.0.1", port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
        deadline = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield http
    server.should_exit = True
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.mark.req("ARCH-01")
def test_an_engine_of_another_package_answers_and_takes_weights(
    scripted_server: httpx.Client,
) -> None:
    http = scripted_server
    assert http.get("/health/").status_code == 200
    (before,) = http.post("/infer/", json=CALL).json()
    assert before["response"]["choices"][0]["message"]["content"] == "0 hello"
    (port,) = free_ports(1)
    weights = {"a": torch.full((2, 3), 1.5), "b": torch.ones(4)}
    with weight_group(http, port, world_size=3) as sender:
        report = push(http, sender, weights, version=1)
        assert report["verified"] == 2
        refused = start(http, 2, {"c": torch.ones(1)})
        assert Problem.model_validate(refused.json()).kind == "manifest-mismatch"
    (after,) = http.post("/infer/", json=CALL).json()
    assert after["response"]["choices"][0]["message"]["content"] == "13 hello"
    assert after["coordexp"]["weights_version"] == [1, 1]


@pytest.mark.req("ARCH-01")
def test_what_serves_an_engine_does_not_load_vllm() -> None:
    program = """
import sys
import rollout_server.engines.vllm, rollout_server.http.app, rollout_server.serve
print(*[name for name in sys.modules if name.partition(".")[0] == "vllm"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []
