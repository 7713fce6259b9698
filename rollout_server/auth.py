"""With a token, every route but the probes of life wants `Authorization: Bearer` (SRV-06)."""

import hmac
from typing import Any

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_server.paths import route_of
from rollout_server.problems import problem_response
from shared_contracts.errors import Problem

OPEN_PATHS = ("/live/", "/health/")


class BearerToken:
    """Middleware that answers 401 in place of the app where the token is missing or wrong.

    A path that does not exist wants it as well: nobody learns the routes without it.
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
        answer.headers["WWW-Authenticate"] = "Bearer"
        await answer(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = Headers(scope=scope).getlist("authorization")
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(" ")
        same = hmac.compare_digest(token.strip().encode("latin-1"), self._token)
        return same and scheme.lower() == "bearer"


def declare_token(document: dict[str, Any], response: dict[str, Any]) -> None:
    """Say in an OpenAPI document which routes want a token.

    response: the 401 they answer without it.
    """
    schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["token"] = {"type": "http", "scheme": "bearer"}
    for path, operations in document["paths"].items():
        if path not in OPEN_PATHS:
            for operation in operations.values():
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = response
