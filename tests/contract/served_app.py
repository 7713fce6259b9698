"""An app of the server without vLLM, called in this process or on a real socket."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem

Address = tuple[str, int]
REQUEST = {"messages": [{"role": "user", "content": "x"}]}


def settings(**options: Any) -> ServerSettings:
    return ServerSettings(model=Path("/m"), device="cpu", **options)


def client_of(pool: type[Pool] = Pool, **options: Any) -> TestClient:
    """A client of a server whose engines have not started. options: its settings."""
    return TestClient(
        create_app(pool(settings(**options))),
        base_url="http://127.0.0.1",
        follow_redirects=False,
        raise_server_exceptions=False,
    )


def problem_of(answer: Any) -> Problem:
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
    problem = Problem.model_validate(answer.json())
    assert problem.status == answer.status_code
    return problem


@contextmanager
def served_app(app: Any, force_exit: bool = False, **config: Any) -> Iterator[Address]:
    """Serve `app` on a free loopback port, in a thread; connections wait until it has started.

    force_exit: the end of the block closes open connections. config: of `uvicorn.Config`.
    """
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, **config))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.force_exit = force_exit
            server.should_exit = True
            thread.join()


@contextmanager
def served_client(app: Any) -> Iterator[httpx.Client]:
    with (
        served_app(app) as (host, port),
        httpx.Client(base_url=f"http://{host}:{port}", timeout=60, trust_env=False) as http,
    ):
        assert http.get("/live/").status_code == 200  # after the lifespan's start
        yield http


def app_of(pool: Pool, **options: Any) -> FastAPI:
    """An app that starts the engines of `pool`, and closes them. options: of `create_app`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pool.start()
        yield
        await pool.close()

    return create_app(pool, lifespan, **options)
