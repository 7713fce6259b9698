"""An app of the server on a real socket of this process."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool

Address = tuple[str, int]


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


def app_of(pool: Pool, **options: Any) -> FastAPI:
    """An app that starts the engines of `pool`, and closes them. options: of `create_app`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pool.start()
        yield
        await pool.close()

    return create_app(pool, lifespan, **options)
