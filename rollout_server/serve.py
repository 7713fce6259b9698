"""Run the server: the port is open at once, and the engines start in the background.

`/live/` answers 200 from the start; `/health/` and `/infer/` answer 503 until every engine is
ready. The process ends with exit code 1 if an engine cannot be built within `start_seconds`, and
with 2 if its repeat guard is not active.

SIGTERM closes the port. Calls that are still running after `grace_seconds` are answered with a
problem. Then all child processes are ended.
"""

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import NoReturn

import uvicorn
from fastapi import FastAPI

from rollout_server.http.app import create_app
from rollout_server.http.guards import HEADER_BYTES, DeadlineProtocol
from rollout_server.runtime.logs import take_over_torch
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from shared_contracts.cli import describe, exit_code, ignores_interrupts
from shared_contracts.errors import ContractError, RunError
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

logger = logging.getLogger(__name__)

# Time to send the answers of calls that the pool has ended.
ANSWERS_S = 3


def serve(settings: ServerSettings, listener: socket.socket) -> NoReturn:
    """Serve on `listener` until SIGTERM or SIGINT, then end the process.

    SIGINT stays ignored if the parent ignored it. The caller has set up logging (`set_up_logging`)
    and the environment (`engines.vllm.environment`).
    """
    if settings.log_format == "json":
        take_over_torch()
    # For the time before uvicorn's own handlers, and for the signal that uvicorn raises again at
    # its end.
    for number in (signal.SIGTERM,) if ignores_interrupts() else (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _leave(0))
    pool = Pool(settings)
    failures: list[Exception] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        start = asyncio.create_task(start_engines())
        yield
        start.cancel()
        await pool.close()

    async def start_engines() -> None:
        began = time.monotonic()
        try:
            await pool.start()
        except Exception as error:  # vLLM raises any
            logger.exception("an engine could not start")
            failures.append(error)
            server.should_exit = True
        else:
            # A full collection stops the event loop for 0.4 s: existing objects are left out of it.
            gc.collect()
            gc.freeze()
            logger.info("ready after %.1f s", time.monotonic() - began)

    app = create_app(pool, lifespan)
    for name in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        os.environ.pop(name, None)  # engines inherit the environment and need no token
    config = uvicorn.Config(
        app,
        http=DeadlineProtocol,
        h11_max_incomplete_event_size=HEADER_BYTES,
        ws="none",
        log_config=None,
        access_log=False,
        # A learner trains longer than uvicorn's 5 s between two calls, and a close by the server
        # can collide with the next call.
        timeout_keep_alive=3600,
        # The pool ends its own calls after `grace_seconds`.
        timeout_graceful_shutdown=round(settings.grace_seconds) + ANSWERS_S,
    )
    server = DrainingServer(config, pool, settings.grace_seconds)
    server.run(sockets=[listener])
    _leave(print_failure(failures[0], settings) if failures else 0)


def print_failure(failure: Exception, settings: ServerSettings) -> int:
    """Print the failure of an engine's start; return the exit code."""
    if not isinstance(failure, ContractError):
        reason = " ".join(str(failure).split())
        text = f"an engine could not start with {settings.model}; its log is above ({reason})"
        failure = RunError(text)
    print(describe(failure), file=sys.stderr)
    return exit_code(failure)


def _leave(code: int) -> NoReturn:
    """Kill the remaining children (of unfinished builds), and end the process without destructors.

    vLLM's destructors take seconds. That of an incomplete AsyncLLM can wait for its own thread for
    ever.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that ends running calls `grace_seconds` after the stop signal."""

    def __init__(self, config: uvicorn.Config, pool: Pool, grace_seconds: float) -> None:
        super().__init__(config)
        self._pool = pool
        self._grace_seconds = grace_seconds
        self._ignores_interrupts = ignores_interrupts()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM and SIGINT, unless SIGINT is ignored."""
        if sig != signal.SIGINT or not self._ignores_interrupts:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        end_of_grace = loop.call_later(self._grace_seconds, self._pool.stop_calls)
        await super().shutdown(sockets)
        end_of_grace.cancel()
