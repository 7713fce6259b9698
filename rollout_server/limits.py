"""Bounds of what callers may ask for: bytes, calls at once, sequences (SRV-06).

BodyLimit   413 for a larger body, before or while it is read
CallLimit   429 for one `/infer/` call too many, before its body is read
check_size  422 for a call of too many sequences
"""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.paths import route_of
from rollout_server.problems import problem_response, refusal
from rollout_server.settings import ServerSettings
from shared_contracts.errors import PROBLEM_TITLES, Problem
from shared_contracts.infer import InferCall, RequestConfig

RETRY_AFTER_S = 1

_TOO_LARGE, _ = PROBLEM_TITLES["body-too-large"]


class BodyLimit:
    """Middleware that lets no more than `max_bytes` of a body through."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._detail = f"the body is larger than {max_bytes / 2**20:g} MiB (max_body_mib)"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._announces_more(scope):
            answer = problem_response(Problem.of("body-too-large", self._detail, "body"))
            await answer(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    def _announces_more(self, scope: Scope) -> bool:
        announced = Headers(scope=scope).get("content-length", "")
        return announced.isdecimal() and (len(announced) > 18 or int(announced) > self._max_bytes)

    def _counted(self, receive: Receive) -> Receive:
        """`receive`, for a body that did not announce its length or lied about it."""
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(_TOO_LARGE, self._detail)
            return message

        return counted


class CallLimit:
    """Middleware that lets no more than `max_calls` calls of `/infer/` run at once."""

    def __init__(self, app: ASGIApp, max_calls: int) -> None:
        self._app = app
        self._max_calls = max_calls
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if route_of(scope) != "/infer/":
            await self._app(scope, receive, send)
            return
        if self._running >= self._max_calls:
            await self._refusal()(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1

    def _refusal(self) -> ASGIApp:
        detail = f"{self._max_calls} calls are running (max_concurrent_calls); try again"
        answer = problem_response(Problem.of("too-many-calls", detail, "POST /infer/"))
        answer.headers["Retry-After"] = str(RETRY_AFTER_S)
        return answer


def check_size(call: InferCall, settings: ServerSettings) -> None:
    """Raises the `invalid-request` problem for more requests, or sequences, than served."""
    requests = len(call.infer_requests)
    sequences = requests * (call.request_config or RequestConfig()).n
    bound = f"{settings.max_requests_per_call} (max_requests_per_call)"
    if requests > settings.max_requests_per_call:
        raise refusal(
            "invalid-request", f"{requests} requests are more than {bound}", "infer_requests"
        )
    if sequences > settings.max_requests_per_call:
        detail = f"{requests} requests of n sequences each make more than {bound}"
        raise refusal("invalid-request", detail, "request_config.n")
