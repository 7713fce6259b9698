"""Guards in front of the routes (SRV-06): middlewares, FastAPI dependencies and limits of calls.

    CanonicalPaths     one form of each path
    HostCheck          421 for a `Host` that is not a name of this server
    BodyLimit          413 for a large body, 408 for a slow one
    TokenCheck         401 without the token
    ConcurrencyLimit   429 for too many generating calls
    check_sequences    422 for a call of too many sequences

A web page of another site can make a browser call a server on 127.0.0.1, which needs no token. Such
calls have the other site as `Host`, or are not JSON (`bodies.JsonBody`), or are OPTIONS (405).
"""

import asyncio
import hmac
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from fastapi import HTTPException, Request
from fastapi.security import HTTPBearer
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.http.problems import problem_response
from rollout_server.runtime.refusals import refusal
from shared_contracts.errors import Problem

BODY_S = 120.0
CLOSE = {"Connection": "close"}


class CanonicalPaths:
    """Middleware that changes `/infer` to the path of its route, `/infer/`.

    It removes the last slash of a path that is not in `paths`; and line feeds at the end, which
    Starlette ignores when it matches a path.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/\n")
        path = f"{path}/" if f"{path}/" in self._paths else path or "/"
        await self._app({**scope, "path": path}, receive, send)


class HostCheck:
    """Starlette's `TrustedHostMiddleware` with a problem document as its answer."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = [*hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def serve(scope: Scope, receive: Receive, _: Send) -> None:
            await self._app(scope, receive, send)

        async def refuse(message: Message) -> None:
            if message["type"] == "http.response.start":
                host = Headers(scope=scope).get("host")
                detail = (
                    f"{host!a} is not a name of this server; call it by one of "
                    f"{', '.join(self._hosts)}, or start it with --allowed-host NAME"
                )
                problem = Problem.of("misdirected", detail, "Host")
                await problem_response(problem)(scope, receive, send)

        check = TrustedHostMiddleware(serve, self._hosts, www_redirect=False)
        await check(scope, receive, refuse)


class BodyLimit:
    """Middleware that limits the bytes and the seconds of each body that the app reads."""

    def __init__(self, app: ASGIApp, max_bytes: int, body_s: float = BODY_S) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling: a proxy and h11 may read different lengths.
            detail = "a call has Content-Length or Transfer-Encoding, not both"
            problem = Problem.of("bad-request", detail, "header")
            await problem_response(problem, CLOSE)(scope, receive, send)
            return
        announced = int(headers.get("content-length", 0))
        deadline = asyncio.get_running_loop().time() + self._body_s
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
                detail = f"the body was not complete after {self._body_s:g} s"
                raise HTTPException(408, detail, CLOSE) from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            self._check(received)
            return message

        await self._app(scope, limited, send)

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            limit = f"{self._max_bytes / 2**20:g} MiB (max_body_mib)"
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


class ConcurrencyLimit:
    """Limit of calls at the same time; a call counts after its body is complete."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._running = 0

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count one call during the block; raises the `too-many-calls` problem."""
        if self._running >= self._max_calls:
            detail = f"{self._max_calls} calls are running (max_concurrent_calls); try again"
            raise refusal("too-many-calls", detail, "max_concurrent_calls")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


def check_sequences(requests: int, n: int, most: int) -> None:
    """Raise the `invalid-request` problem for more than `most` sequences, `n` of each request."""
    if requests * n > most:
        where = "infer_requests" if requests > most else "request_config.n"
        detail = (
            f"{requests} requests of {n} sequences are more than {most} (max_requests_per_call)"
        )
        raise refusal("invalid-request", detail, where)
