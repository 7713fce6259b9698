"""Run the server: the port answers at once, the engines start behind it.

`/live/` says 200 from the start; `/health/` and `/infer/` say 503 until every engine is
ready. An engine that cannot be built at the start ends the process with exit code 1, and
one whose repeat guard cannot be activated with 2.

SIGTERM closes the port; calls that run have `grace_seconds` to finish and are answered
with a problem after that. Then every child process is ended.
"""

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from types import FrameType
from typing import NoReturn

import uvicorn
from fastapi import FastAPI

from rollout_server.engines.engine_protocol import GuardInactive
from rollout_server.http.app import create_app
from rollout_server.http.connections import bounded_protocol
from rollout_server.runtime.logs import take_over_torch
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.repeat_config import ACTIVATION
from shared_contracts.cli import describe, exit_code, ignores_interrupts
from shared_contracts.errors import ContractError, RunError
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

logger = logging.getLogger(__name__)

# How long the answers of calls that were ended may take to be sent.
ANSWERS_S = 3


def serve(settings: ServerSettings, listener: socket.socket) -> NoReturn:
    """Serve on `listener` until SIGTERM or SIGINT, then end the process.

    A SIGINT that the process inherited as ignored stays ignored.

    Logging must be set up (`set_up_logging`), and the engine's environment be in place
    (`EnginePackage.environment`). When an engine cannot start, the process says so and ends with
    exit code 1 or 2.
    """
    if settings.log_format == "json":
        take_over_torch()
    # Before uvicorn listens to signals nothing is started yet; it hands one on when it is done,
    # and by then everything is stopped.
    for number in (signal.SIGTERM,) if ignores_interrupts() else (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _leave(0))
    engines = EngineLife(Pool(settings), settings.grace_seconds)
    app = create_app(engines.pool, engines.lifespan)
    for name in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        os.environ.pop(name, None)  # engines inherit the environment, and need no token
    config = uvicorn.Config(
        app,
        http=bounded_protocol(settings.max_connections),
        ws="none",
        log_config=None,
        access_log=False,
        # A learner trains for longer than uvicorn's 5 s between two calls; closing the
        # connection then can cross with its next call.
        timeout_keep_alive=3600,
        # The pool ends the calls after the grace period; this is for what it does not know.
        timeout_graceful_shutdown=round(settings.grace_seconds) + ANSWERS_S,
    )
    engines.server = DrainingServer(config, engines.pool, settings.grace_seconds)
    engines.server.run(sockets=[listener])
    if engines.failure is not None:
        _leave(tell(engines.failure, settings))
    _leave(0)


def tell(failure: BaseException, settings: ServerSettings) -> int:
    """Say why no engine could start; the exit code."""
    reason = " ".join(str(failure).split())
    error = (
        ContractError("repeat_terminate", reason, ACTIVATION)
        if isinstance(failure, GuardInactive)
        else RunError(
            f"an engine could not start with {settings.model}; its log is above ({reason})"
        )
    )
    print(describe(error), file=sys.stderr)
    return exit_code(error)


def _look_less_for_garbage() -> None:
    """Keep what the engines need out of it, and wait for more between two looks.

    A look at everything stops the event loop for 0.4 s, and one call of thousands of requests
    brings several.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


def _leave(code: int) -> NoReturn:
    """End the process on the spot; everything it started has ended.

    Taking vLLM apart would take seconds, or for ever where an AsyncLLM was built half way:
    its destructor may run in a thread of its own pool and then waits for that thread.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class DrainingServer(uvicorn.Server):
    """Ends the calls that still run `grace_seconds` after the signal to stop."""

    def __init__(self, config: uvicorn.Config, pool: Pool, grace_seconds: float) -> None:
        super().__init__(config)
        self._pool = pool
        self._grace_seconds = grace_seconds
        self._ignores_interrupts = ignores_interrupts()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; uvicorn's handler of SIGTERM and SIGINT."""
        if sig != signal.SIGINT or not self._ignores_interrupts:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        end_of_grace = loop.call_later(self._grace_seconds, self._pool.stop_calls)
        await super().shutdown(sockets)
        end_of_grace.cancel()


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
        start.cancel()
        await self.pool.close()
        if self.pool.building:
            await self._interrupt_builds()

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
            _look_less_for_garbage()
            logger.info("ready after %.1f s", time.monotonic() - began)

    async def _interrupt_builds(self) -> NoReturn:
        """Kill what is being built, then end the process.

        The threads that build cannot be stopped while they import, so no longer than the
        grace period is spent on it.
        """
        deadline = time.monotonic() + self._grace_seconds
        while self.pool.building and time.monotonic() < deadline:
            for child in multiprocessing.active_children():
                child.kill()
            await asyncio.sleep(0.1)
        _leave(0)
