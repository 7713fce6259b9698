"""`GET /v1/models` and `POST /v1/chat/completions`, for `--openai` (OAI-01).

A call waits while the weights are UPDATING. Then vLLM's app renders the prompt and calls
`OpenAIMount._generate`, which chooses the replica that generates. The app is bound to the renderer
of one replica; it is rebuilt if that replica is lost. Errors of the app have OpenAI's form;
refusals of this server are problem documents.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from contextvars import ContextVar
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_server.engines.engine_protocol import Engine
from rollout_server.http.guards import ConcurrencyLimit
from rollout_server.http.problems import answer_refusal
from rollout_server.runtime.concurrency import handed_over
from rollout_server.serving.infer import Turns, charged, least_loaded
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import CHAT, CallRecord
from shared_contracts.errors import ProblemError

MODELS = "/v1/models"

_record: ContextVar[CallRecord] = ContextVar("record of the current call")


def add_openai(router: APIRouter, pool: Pool, limit: ConcurrencyLimit) -> None:
    """Add both routes; `/infer/` shares `limit`."""
    mount, chat = OpenAIMount(pool, limit), CHAT.rstrip("/")
    router.add_api_route(MODELS, mount.models, include_in_schema=False)
    router.add_api_route(chat, mount.chat_completions, methods=["POST"], include_in_schema=False)


class OpenAIMount:
    """The handlers of both routes."""

    def __init__(self, pool: Pool, limit: ConcurrencyLimit) -> None:
        self._pool = pool
        self._limit = limit
        self._app_lock = asyncio.Lock()
        self._renderer: Engine | None = None
        self._app = FastAPI()

    async def models(self) -> Response:
        record = CallRecord(MODELS)
        return _AppResponse(await self._ready_app(record), record, nullcontext())

    async def chat_completions(self, request: Request) -> Response:
        record: CallRecord = request.state.call_record
        return _AppResponse(await self._ready_app(record), record, self._limit)

    async def _ready_app(self, record: CallRecord) -> FastAPI:
        """Return the app of a replica that serves the current weights."""
        async with self._app_lock:
            with record.phase("wait"):
                engines = await self._pool.until_stopped(self._pool.serving())
            if self._renderer not in engines:
                self._app = await engines[0].openai_app(self._generate)
                self._app.exception_handler(ProblemError)(answer_refusal)
                self._renderer = engines[0]
        record.weights_version = (engines[0].weights_version,) * 2
        return self._app

    async def _generate(
        self, prompt: Any, sampling: Any, tokens: int, sequences: int
    ) -> AsyncGenerator[Any, None]:
        """Yield the outputs of the least loaded replica (`ChatGenerate`)."""
        record = _record.get()
        with record.phase("wait"):
            engine = least_loaded(await self._pool.serving())
        turn = Turns().take(engine, sequences)

        async def stream(send: Callable[[Any], None]) -> None:
            with record.phase("generate"), charged(engine, tokens, sequences, turn):
                running = engine.stream(prompt, sampling, turn, send)
                await self._pool.until_stopped(running)

        async with aclosing(handed_over(stream)) as outputs:
            async for output in outputs:
                # All sequences of an engine end before its version changes.
                record.weights_version = (engine.weights_version,) * 2
                yield output


class _AppResponse(Response):
    """A response that passes the call to `app`. held: entered while `app` runs."""

    def __init__(
        self, app: ASGIApp, record: CallRecord, held: AbstractAsyncContextManager[None]
    ) -> None:
        super().__init__()
        self._app = app
        self._record = record
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _record.set(self._record)
        async with self._held:
            await self._app({**scope}, receive, send)
