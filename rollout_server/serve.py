"""Run the server: the port answers at once, the engines start behind it.

`/live/` says 200 from the start; `/health/` and `/infer/` say 503 until every engine is
ready. An engine that cannot be built ends the process with exit code 1.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI

from rollout_server.app import create_app
from rollout_server.pool import Pool
from rollout_server.settings import ServerSettings

logger = logging.getLogger(__name__)


def serve(settings: ServerSettings, listener: socket.socket) -> int:
    """Serve on `listener` until SIGTERM or SIGINT; the exit code of the process.

    The engine's environment must be in place (`apply_engine_environment`).
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(levelname)s %(asctime)s %(name)s: %(message)s"
    )
    # uvicorn hands a signal on when it is done; by then everything is stopped.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    engines = EngineLife(Pool(settings), settings.grace_seconds)
    config = uvicorn.Config(
        create_app(engines.pool, engines.lifespan),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=max(1, round(settings.grace_seconds)),
    )
    engines.server = uvicorn.Server(config)
    engines.server.run(sockets=[listener])
    if engines.failure is None:
        return 0
    print(
        f"error: {settings.model}\n"
        f"found: an engine could not start ({engines.failure})\n"
        "do: see the engine's log above",
        file=sys.stderr,
    )
    return 1


class EngineLife:
    """Ties the life of the engines to the life of the HTTP server.

    failure: why an engine could not start, if so.
    """

    server: uvicorn.Server

    def __init__(self, pool: Pool, grace_seconds: float) -> None:
        self.pool = pool
        self.failure: BaseException | None = None
        self._grace_seconds = grace_seconds
        self._stopping = False

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        start = asyncio.create_task(self._start())
        yield
        self._stopping = True
        await self._interrupt(start)
        await self.pool.close()

    async def _start(self) -> None:
        began = time.monotonic()
        try:
            await self.pool.start()
        except Exception as error:  # whatever vLLM raises: the process ends with it
            if not self._stopping:
                logger.exception("an engine could not start")
                self.failure = error
                self.server.should_exit = True
        else:
            logger.info("ready after %.1f s", time.monotonic() - began)

    async def _interrupt(self, start: asyncio.Task[None]) -> None:
        """Make a running `start` fail by killing what it builds.

        The threads that build cannot be stopped while they import; after the grace
        period the process leaves them behind and ends on the spot.
        """
        deadline = time.monotonic() + self._grace_seconds
        while not start.done():
            for child in multiprocessing.active_children():
                child.kill()
            if time.monotonic() > deadline:
                os._exit(0)
            await asyncio.sleep(0.1)
