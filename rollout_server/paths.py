"""Paths as the middlewares read them: one spelling for each route."""

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_server.problems import problem_response
from shared_contracts.errors import Problem


def route_of(scope: Scope) -> str:
    """The path with exactly one slash at its end; empty for what is no HTTP call."""
    return f"{scope['path'].rstrip('/')}/" if scope["type"] == "http" else ""


class PlainPaths:
    """Middleware that finds nothing at a path with control characters.

    Starlette would take a line feed at its end for nothing, and all that looks at paths by
    itself would not.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].isprintable():
            where = f"{scope['method']} {scope['path']!a}"
            answer = problem_response(Problem.of("not-found", "no path is like this", where))
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)
