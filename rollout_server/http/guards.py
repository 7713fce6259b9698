"""Guards in front of the routes (SRV-06): connections, middlewares, dependencies, limits of calls.

    DeadlineProtocol   431 for a large header, 408 for a slow one
    CanonicalPaths     one form of each path
    HostCheck          421 for a `Host` that is not a name of this server
    BodyLimit          413 for a large body, 408 for a slow one
    TokenCheck         401 without the token
    JsonBody           400 for a body that is not JSON, 422 for one that is not its model
    ConcurrencyLimit   429 for too many generating calls
    check_sequences    422 for a call of too many sequences

A web page of another site can make a browser call a server on 127.0.0.1, which needs no token. Such
calls have the other site as `Host`, or are not JSON (`JsonBody`), or are OPTIONS (405).
"""

import asyncio
import hmac
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, Literal, TypeVar

import h11
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollout_server.http.problems import CLOSE, problem_response
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem, refusal

# `h11_max_incomplete_event_size` of the `uvicorn.Config`.
HEADER_BYTES = 64 * 2**10

HEADER_S = 10.0

BODY_S = 120.0

# Largest number of faults in one answer.
MAX_FAULTS = 20

JSON_TYPE = re.compile(r"\s*application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)

Model = TypeVar("Model", bound=BaseModel)


class DeadlineProtocol(H11Protocol):
    """One connection, for `uvicorn.Config(http=...)`.

    `header_s` limits the time until the first byte, the time of a header, and the time of a body
    that the app does not read. `BodyLimit` limits the time of other bodies, and uvicorn's
    keep-alive the time between two requests.
    """

    header_s = HEADER_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.header_s, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 refuses with a problem instead of uvicorn's plain text."""
        if len(self.conn.trailing_data[0]) > HEADER_BYTES:
            detail = f"it has more than {HEADER_BYTES} bytes"
            self._refuse(Problem.of("header-too-large", detail, "header"))
        else:
            self._refuse(Problem.of("bad-request", msg, "connection"))

    def _update_timer(self) -> None:
        body_is_unread = self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if not (body_is_unread or self._is_in_header()):
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.header_s, self._expire)

    def _is_in_header(self) -> bool:
        return self.conn.their_state is h11.IDLE and len(self.conn.trailing_data[0]) > 0

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self._is_in_header():
            detail = f"the header was not complete after {self.header_s:g} s"
            self._refuse(Problem.of("too-slow", detail, "header"))
        self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Answer, unless an answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = problem.model_dump_json(exclude_none=True).encode()
            headers = [
                ("content-type", PROBLEM_MEDIA_TYPE),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            reason = HTTPStatus(problem.status).phrase
            for event in (
                h11.Response(status_code=problem.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # drops the app's own answer
        self.transport.close()


@dataclass
class CanonicalPaths:
    """Middleware that changes `/infer` to the path of its route, `/infer/`.

    It removes the last slash of a path that is not in `paths`; and line feeds at the end, which
    Starlette ignores when it matches a path.
    """

    app: ASGIApp
    paths: Collection[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/\n")
            path = f"{path}/" if f"{path}/" in self.paths else path or "/"
            scope = {**scope, "path": path}
        await self.app(scope, receive, send)


@dataclass
class HostCheck:
    """Starlette's `TrustedHostMiddleware` with a problem document as its answer."""

    app: ASGIApp
    hosts: Sequence[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def serve(scope: Scope, receive: Receive, _: Send) -> None:
            await self.app(scope, receive, send)

        async def refuse(message: Message) -> None:
            if message["type"] == "http.response.start":
                host = Headers(scope=scope).get("host")
                detail = (
                    f"{host!a} is not a name of this server; call it by one of "
                    f"{', '.join(self.hosts)}, or start it with --allowed-host NAME"
                )
                problem = Problem.of("misdirected", detail, "Host")
                await problem_response(problem)(scope, receive, send)

        check = TrustedHostMiddleware(serve, self.hosts, www_redirect=False)
        await check(scope, receive, refuse)


@dataclass
class BodyLimit:
    """Middleware that limits the bytes and the seconds of each body that the app reads."""

    app: ASGIApp
    max_bytes: int
    body_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling: a proxy and h11 may read different lengths.
            detail = "a call has Content-Length or Transfer-Encoding, not both"
            problem = Problem.of("bad-request", detail, "header")
            await problem_response(problem, CLOSE)(scope, receive, send)
            return
        announced = int(headers.get("content-length", 0))
        deadline = asyncio.get_running_loop().time() + self.body_s
        received, complete = 0, False

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # the next message is a disconnect
                return await receive()
            self._check(announced)
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                detail = f"the body was not complete after {self.body_s:g} s"
                raise HTTPException(408, detail, CLOSE) from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            self._check(received)
            return message

        await self.app(scope, limited, send)

    def _check(self, size: int) -> None:
        if size > self.max_bytes:
            limit = f"{self.max_bytes / 2**20:g} MiB (max_body_mib)"
            raise HTTPException(413, f"the body is larger than {limit}")


class TokenCheck(HTTPBearer):
    """FastAPI dependency that answers 401 unless a call has the token.

    Its security scheme in OpenAPI is `token`.
    """

    def __init__(self, token: SecretStr) -> None:
        super().__init__(scheme_name="token", auto_error=False)
        self._token = token

    async def __call__(self, request: Request) -> None:
        headers = request.headers.getlist("authorization")
        scheme, _, value = (headers[0] if len(headers) == 1 else "").partition(" ")
        secret = value.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        if not hmac.compare_digest(secret, self._token.get_secret_value().encode()):
            detail = "send the server's token as `Authorization: Bearer TOKEN`"
            raise HTTPException(401, detail, {"WWW-Authenticate": "Bearer"})


@dataclass(frozen=True)
class JsonBody(Generic[Model]):
    """FastAPI dependency that returns the body as a `model`.

    It runs after the router's dependencies, such as the token check. FastAPI's own body parameter
    reads the body before them.
    """

    model: type[Model]

    async def __call__(self, request: Request) -> Model:
        """Raise the `bad-request` problem, or RequestValidationError with at most MAX_FAULTS."""
        if not JSON_TYPE.match(request.headers.get("content-type", "")):
            found = "it is not sent as JSON; give the header `content-type: application/json`"
            raise refusal("bad-request", found, "body")
        body = await request.body()
        try:
            return self.model.model_validate_json(body)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False, include_context=False)
        first = [{**fault, "loc": ("body", *fault["loc"])} for fault in faults[:MAX_FAULTS]]
        is_json = first[0]["type"] != "json_invalid"
        raise RequestValidationError(first, body=from_json(body) if is_json else None)


def declare_bodies(app: FastAPI) -> None:
    """Add the bodies of `JsonBody` routes to the OpenAPI document of `app`."""
    models = {
        route.path: dependency.call.model
        for route in app.routes
        if isinstance(route, APIRoute)
        for dependency in route.dependant.dependencies
        if isinstance(dependency.call, JsonBody)
    }
    schemas, definitions = models_json_schema(
        [(model, "validation") for model in models.values()],
        ref_template="#/components/schemas/{model}",
    )
    document = app.openapi()
    document["components"]["schemas"] |= definitions["$defs"]
    for path, model in models.items():
        content = {"application/json": {"schema": schemas[model, "validation"]}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}


class ConcurrencyLimit(asyncio.Semaphore):
    """Limit of calls at the same time; a call counts after its body is complete."""

    def __init__(self, max_calls: int) -> None:
        super().__init__(max_calls)
        self._max_calls = max_calls

    async def acquire(self) -> Literal[True]:
        """Count one call; raises the `too-many-calls` problem instead of waiting."""
        if self.locked():
            detail = f"{self._max_calls} calls are running (max_concurrent_calls); try again"
            raise refusal("too-many-calls", detail, "max_concurrent_calls")
        return await super().acquire()


def check_sequences(requests: int, n: int, most: int) -> None:
    """Raise the `invalid-request` problem for more than `most` sequences, `n` of each request."""
    if requests * n > most:
        where = "infer_requests" if requests > most else "request_config.n"
        detail = (
            f"{requests} requests of {n} sequences are more than {most} (max_requests_per_call)"
        )
        raise refusal("invalid-request", detail, where)
