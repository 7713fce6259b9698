"""Middlewares around the routes, and the bounds of calls.

    PlainPaths    404 for a path with control characters
    AccessLog     one line of every call, however it ended, and its place in the metrics
    OwnSite       403 and 421 for what a page of another site sends through a browser
    BearerToken   401 where the token is missing or wrong
    BodyLimit     413 for a larger body; 503 where all that are held are too large together
    Places        429 for one call too many of those that generate
    check_size    422 for a call of too many sequences

A browser sends a page's calls from the machine it runs on, so every page that is open there can
reach a server on 127.0.0.1, where no token is needed. `OwnSite` refuses a foreign `Origin` and a
`Host` that is not served here (a name that was pointed here); forms fail at `bodies.StrictRoute`.
"""

import base64
import binascii
import hmac
import ipaddress
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.http.problems import problem_response
from rollout_server.runtime.refusals import refusal
from rollout_server.serving.telemetry import GENERATING, CallRecord, Telemetry
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import PROBLEM_TITLES, Problem

# --- paths


def route_of(scope: Scope) -> str:
    """Return the path with exactly one slash at its end; empty for what is no HTTP call."""
    return f"{scope['path'].rstrip('/')}/" if scope["type"] == "http" else ""


class PlainPaths:
    """Middleware that answers 404 to a path with control characters.

    Starlette would take a line feed at its end for nothing, and all that looks at paths by
    itself would not.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].isprintable():
            where = f"{scope['method']} {scope['path']!a}"
            answer = problem_response(Problem.of("not-found", "there is no such path", where))
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)


# --- access log (SRV-08)


logger = logging.getLogger("rollout_server.access")

KEEP = "/keep_communicator/"
WEIGHT_ROUTES = (
    "/init_communicator/",
    "/start_weight_update/",
    "/update_weights/",
    "/finish_weight_update/",
    KEEP,
    "/close_communicator/",
    "/sleep/",
    "/wake_up/",
)


class AccessLog:
    """The outermost middleware: it sees the calls that other middlewares refuse, too.

    Puts the `CallRecord` of a call into `request.state.call_record`.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = route_of(scope)
        if route in GENERATING:
            with self._telemetry.in_flight():
                await self._noted(CallRecord(route), scope, receive, send)
        elif route in WEIGHT_ROUTES:
            await self._noted(CallRecord(route), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _noted(self, record: CallRecord, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["call_record"] = record
        refusal = bytearray()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            elif record.status >= 400:
                refusal.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            record.status, record.problem = 500, "internal"  # as it is answered further out
            raise
        finally:
            if refusal:
                record.problem = Problem.model_validate_json(refusal).kind
            self._telemetry.count_call(record)
            if record.route != KEEP or record.problem is not None:  # else every two seconds
                log_call(record)


def log_call(record: CallRecord) -> None:
    """Log the call in one line; in JSON its fields are beside the message."""
    fields = _fields(record)
    logger.info("%s", " ".join(f"{k}={_shown(v)}" for k, v in fields.items()), extra=fields)


def _fields(record: CallRecord) -> dict[str, object]:
    fields: dict[str, object] = {
        "route": record.route,
        "status": record.status,
        "outcome": record.outcome,
        "seconds": round(time.monotonic() - record.began, 4),
    }
    if record.problem is not None:
        fields["problem"] = record.problem
    return fields | _generating_fields(record) if record.route in GENERATING else fields


def _generating_fields(record: CallRecord) -> dict[str, object]:
    fields: dict[str, object] = {
        f"{phase}_seconds": round(seconds, 4) for phase, seconds in record.seconds.items()
    }
    fields |= {
        "requests": record.requests,
        "images": record.images,
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": record.generated_tokens,
        "guard_triggers": record.guard_triggers,
    }
    if record.weights_version is not None:
        fields["weights_version"] = "-".join(map(str, sorted(set(record.weights_version))))
    if record.request_id is not None:
        fields["request_id"] = record.request_id
    return fields


def _shown(value: object) -> str:
    """Escape an id, because callers choose it: it must not forge a field or a line."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else ascii(text)


# --- pages of other sites (SRV-06)


_READING = ("GET", "HEAD")


class OwnSite:
    """Middleware that refuses what a browser sends for a page of another site.

    hosts: names that `Host` may give beside addresses and localhost; None takes every name,
        where a token is needed anyhow.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self._app = app
        self._hosts = None if hosts is None else {"localhost", *map(str.lower, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await problem_response(problem)(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        host = ",".join(headers.getlist("host"))  # every browser sends one
        if host and self._hosts is not None and not self._is_served(host):
            detail = f"{host!a} is not served here; name it with --allowed-host"
            return Problem.of("misdirected", detail, "Host")
        for origin in headers.getlist("origin"):
            if origin.partition("://")[2].lower() != host.lower():
                return Problem.of("foreign-origin", f"the call is one of {origin!a}", "Origin")
        site = headers.get("sec-fetch-site", "none")
        if scope["method"] not in _READING and site not in ("none", "same-origin"):
            return Problem.of("foreign-origin", f"the call is {site!a}", "Sec-Fetch-Site")
        return None

    def _is_served(self, host: str) -> bool:
        name = _without_port(host).lower()
        assert self._hosts is not None
        if name in self._hosts:
            return True
        try:  # nobody can point an address elsewhere
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


# --- token (SRV-06)


OPEN_PATHS = ("/live/", "/health/")
_BEARER = "Bearer"
_BASIC = 'Basic realm="token of the rollout server as the password", charset="UTF-8"'


class BearerToken:
    """Middleware that answers 401 in place of the app where the token is missing or wrong.

    A path that does not exist needs it as well, so the routes cannot be found without it.
    """

    def __init__(self, app: ASGIApp, token: SecretStr) -> None:
        self._app = app
        self._token = token.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_of(scope) in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        where = f"{scope['method']} {scope['path']}"
        detail = "send the server's token as `Authorization: Bearer TOKEN`"
        answer = problem_response(Problem.of("unauthorized", detail, where))
        for challenge in (_BASIC, _BEARER) if _is_page(scope) else (_BEARER,):
            answer.headers.append("WWW-Authenticate", challenge)
        await answer(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = Headers(scope=scope).getlist("authorization")
        if len(given) != 1:
            return False
        scheme, _, credentials = given[0].partition(" ")
        token = credentials.strip().encode("latin-1")
        if scheme.lower() == "basic" and _is_page(scope):
            token = _password(token)
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(token, self._token)


def _is_page(scope: Scope) -> bool:
    """Return whether it is `/docs`, one of its files, or its document; all are only read."""
    return route_of(scope).startswith(("/docs/", "/openapi.json/"))


def _password(credentials: bytes) -> bytes:
    """Return the password of basic authentication (RFC 7617), of any user; empty without one."""
    try:
        _, _, password = base64.b64decode(credentials, validate=True).partition(b":")
    except binascii.Error:
        return b""
    return password


def declare_token(document: dict[str, Any], response: dict[str, Any]) -> None:
    """Note in an OpenAPI document which routes need a token.

    response: the 401 they answer without it.
    """
    schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["token"] = {"type": "http", "scheme": "bearer"}
    for path, operations in document["paths"].items():
        if path not in OPEN_PATHS:
            for operation in operations.values():
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = response


# --- bounds (SRV-06)


_TOO_LARGE, _ = PROBLEM_TITLES["body-too-large"]
_OVERLOADED, _ = PROBLEM_TITLES["overloaded"]

# Of a call that brings no images: some 100,000 parameters and their digests.
MOST_OTHER_BYTES = 16 * 2**20


class BodyLimit:
    """Middleware that refuses a body of more than `max_bytes`.

    Of routes that generate nothing no more than MOST_OTHER_BYTES either.
    max_held: bytes of all bodies together; a body counts from its first piece until its call
        has been answered.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_held: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_held = max_held
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most, named = self._max_bytes, "max_body_mib"
        if route_of(scope) not in GENERATING and most > MOST_OTHER_BYTES:
            most, named = MOST_OTHER_BYTES, "only a call that generates takes more"
        detail = f"the body is larger than {most / 2**20:g} MiB ({named})"
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _announces_more(scope, most):
            answer = problem_response(Problem.of("body-too-large", detail, "body"))
            await answer(scope, receive, send)
        else:
            await self._count(scope, receive, send, most, detail)

    async def _count(
        self, scope: Scope, receive: Receive, send: Send, most: int, detail: str
    ) -> None:
        """Pass a body on and count its bytes, as its announced length can be wrong."""
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            piece = len(message.get("body", b""))
            received += piece
            self._held += piece
            if received > most:
                raise HTTPException(_TOO_LARGE, detail)
            if self._held > self._max_held:
                together = f"{self._max_held / 2**20:g} MiB (max_bodies_mib)"
                raise HTTPException(
                    _OVERLOADED, f"the bodies of all calls are larger than {together}; try again"
                )
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= received


def _announces_more(scope: Scope, most: int) -> bool:
    announced = Headers(scope=scope).get("content-length", "")
    return announced.isdecimal() and (len(announced) > 18 or int(announced) > most)


class Places:
    """The places for calls that generate at the same time.

    A call takes its place when its body has arrived, so a slow sender takes none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0

    def require_one(self) -> None:
        """Raise the `too-many-calls` problem if there is none, before the body is read."""
        if self._taken >= self._most:
            detail = f"{self._most} calls are running (max_concurrent_calls); try again"
            raise refusal("too-many-calls", detail, "max_concurrent_calls")

    @contextmanager
    def take(self) -> Iterator[None]:
        self.require_one()
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


def check_size(requests: int, n: int, settings: ServerSettings, where: str) -> None:
    """Raise the `invalid-request` problem for too many sequences.

    n: of each request, given at `where`.
    """
    most = settings.max_requests_per_call
    if requests * n > most:
        bound = f"{most} (max_requests_per_call)"
        detail = f"{requests} requests of n sequences each make more than {bound}"
        raise refusal("invalid-request", detail, where)
