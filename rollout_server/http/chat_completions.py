"""OpenAI's routes, for `--openai` (OAI-01): `/v1/models` and `/v1/chat/completions`.

Answers have the version of their weights in a header. Every error below `/v1/` has OpenAI's form,
and the status that it has at `/infer/`; only 422 becomes 400, as OpenAI's clients know it. A stream
that has begun has its status already: an error is then its last event.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.background import BackgroundTask
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.http.bodies import disconnected, read_chat_call
from rollout_server.http.middleware import Places, check_size, route_of
from rollout_server.runtime.concurrency import cancel_when
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import CHAT, CLIENT_GONE, CallRecord
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem, ProblemError

MODELS = "/v1/models/"
WEIGHTS_VERSION = "X-Weights-Version"


def add_chat_completions(app: FastAPI, pool: Pool, places: Places) -> None:
    """Serve both routes. places: those of `/infer/`."""

    async def models() -> JSONResponse:
        body, version = await pool.chat_models()
        return JSONResponse(body, headers={WEIGHTS_VERSION: str(version)})

    async def chat_completions(request: Request) -> Response:
        places.require_one()
        record: CallRecord = request.state.call_record
        call = read_chat_call(await request.body())
        check_size(1, call.n, pool.settings, "n")

        async def pieces() -> AsyncGenerator[str, None]:
            with places.take():
                async with aclosing(pool.chat(call, record)) as answer:
                    async for piece in answer:
                        yield piece

        answer = pieces()
        begun = _first(answer) if call.stream else _whole(answer)
        first = await cancel_when(disconnected(request), begun, ClientDisconnect())
        assert record.weights_version is not None
        headers = {WEIGHTS_VERSION: str(record.weights_version[0])}
        if not call.stream:
            return Response(first, media_type="application/json", headers=headers)
        events = _events(first, answer, record)

        async def close() -> None:
            await events.aclose()
            await answer.aclose()

        return StreamingResponse(
            events,
            media_type="text/event-stream",
            headers=headers,
            background=BackgroundTask(close),  # also where the client is gone
        )

    _add(app, "GET", MODELS, models)
    _add(app, "POST", CHAT, chat_completions)


def _add(app: FastAPI, method: str, path: str, handler: Callable[..., Awaitable[Response]]) -> None:
    """With and without the trailing slash; OpenAI's own document describes the route."""
    for variant in (path, path.rstrip("/")):
        app.add_api_route(variant, handler, methods=[method], include_in_schema=False)


async def _first(answer: AsyncGenerator[str, None]) -> str:
    return await anext(answer)


async def _whole(answer: AsyncGenerator[str, None]) -> str:
    return "".join([piece async for piece in answer])


async def _events(
    first: str, rest: AsyncGenerator[str, None], record: CallRecord
) -> AsyncGenerator[str, None]:
    """The events of a stream; what breaks it is the last one but its end."""
    try:
        yield first
        async for event in rest:
            yield event
    except ProblemError as error:
        record.problem = error.problem.kind
        yield f"data: {json.dumps(openai_error(error.problem))}\n\n"
        yield "data: [DONE]\n\n"
    except (asyncio.CancelledError, GeneratorExit):
        record.status = CLIENT_GONE
        raise


def openai_error(problem: Problem) -> dict[str, Any]:
    """The body of OpenAI's errors. Its `code` is the kind of the problem, `param` its place."""
    status, kind = _status(problem), "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    message = f"{problem.where}: {problem.detail}"
    return {
        "error": {"message": message, "type": kind, "param": problem.where, "code": problem.kind}
    }


def _status(problem: Problem) -> int:
    return 400 if problem.status == 422 else problem.status


class OpenAIErrors:
    """Middleware that gives the problems of all routes below `/v1/` OpenAI's form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not route_of(scope).startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        start: Message | None = None  # of a problem, whose body follows in one piece

        async def rewrite(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_problem(message):
                start = message
            elif start is not None:
                await _send_error(Problem.model_validate_json(message["body"]), start, send)
                start = None
            else:
                await send(message)

        await self._app(scope, receive, rewrite)


def _is_problem(start: Message) -> bool:
    return MutableHeaders(raw=start["headers"]).get("content-type") == PROBLEM_MEDIA_TYPE


async def _send_error(problem: Problem, start: Message, send: Send) -> None:
    """start: of the problem, whose other headers are kept."""
    body = json.dumps(openai_error(problem)).encode()
    headers = MutableHeaders(raw=start["headers"])
    headers["Content-Type"], headers["Content-Length"] = "application/json", str(len(body))
    await send({**start, "status": _status(problem)})
    await send({"type": "http.response.body", "body": body})
