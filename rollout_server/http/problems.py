"""Problem documents: the form of every error of the server (WIRE-05)."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem, ProblemError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1

# A caller's own key, however long, is a part of the path to it.
MAX_WHERE = 200

NOT_SENT_AS_JSON = "it is not sent as JSON; give the header `content-type: application/json`"

_KIND_OF_STATUS = {
    404: "not-found",
    405: "method-not-allowed",
    413: "body-too-large",
    503: "overloaded",
}


class NoJson(ValueError):
    """A body that is not JSON."""


def install_problem_handlers(app: FastAPI) -> None:
    """Turn our refusals, FastAPI's validation errors and routing errors into problems."""
    app.add_exception_handler(ProblemError, _answer_refusal)
    app.add_exception_handler(NoJson, _answer_no_json)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_failure)


def problem_response(problem: Problem) -> JSONResponse:
    """Return the answer with a problem, for middlewares in front of the routes."""
    return JSONResponse(
        problem.model_dump(exclude_none=True),
        status_code=problem.status,
        headers={"Retry-After": str(RETRY_AFTER_S)} if problem.status == 429 else None,
        media_type=PROBLEM_MEDIA_TYPE,
    )


async def _answer_refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    return problem_response(error.problem)


async def _answer_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = _faults(error)
    kind = "bad-request" if error.errors()[0]["type"] == "json_invalid" else "invalid-request"
    first = errors[0]
    return problem_response(Problem.of(kind, first["detail"], first["where"], errors))


def sent_as_json(headers: Headers) -> bool:
    """Return whether the header says that the body is JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _faults(error: RequestValidationError) -> list[dict[str, Any]]:
    """Return every fault once; the messages of a union's members about one place are joined."""
    faults: dict[str, dict[str, Any]] = {}
    for item in error.errors():
        fault = _fault(item, error.body)
        before = faults.setdefault(fault["where"], fault)
        if fault["detail"] not in before["detail"]:
            before["detail"] += f", or: {fault['detail']}"
    return list(faults.values())


def _fault(item: dict[str, Any], body: Any) -> dict[str, Any]:
    """Return one of pydantic's errors as `{where, detail}`, in an infer request with `index`.

    body: as it was sent; what `loc` names beside its keys are members of a union.
    """
    loc = tuple(item["loc"])
    if loc[:1] == ("body",):
        loc = _sent(loc[1:], body, absent=item["type"] == "missing")
    elif loc[:1] == ("query",):
        loc = loc[1:]
    message = str(item["msg"]).removeprefix("Value error, ")
    where = dotted(loc)[:MAX_WHERE] or "body"
    fault: dict[str, Any] = {"where": where, "detail": message}
    if loc[:1] == ("infer_requests",) and len(loc) > 1 and isinstance(loc[1], int):
        fault["index"] = loc[1]
    return fault


def _sent(loc: tuple[int | str, ...], value: Any, *, absent: bool) -> tuple[int | str, ...]:
    """Return the keys of a location that lie in the body; the last one can be absent."""
    steps: list[int | str] = []
    for place, step in enumerate(loc):
        try:
            value = value[step]
        except (TypeError, KeyError, IndexError):
            if not (absent and place == len(loc) - 1):
                continue
        steps.append(step)
    return tuple(steps)


def dotted(loc: tuple[int | str, ...]) -> str:
    """Write `("infer_requests", 3, "images")` as `infer_requests[3].images`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


async def _answer_no_json(_: Request, error: Exception) -> JSONResponse:
    return problem_response(Problem.of("bad-request", f"it is no JSON: {error}", "body"))


async def _answer_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = _KIND_OF_STATUS.get(error.status_code, "bad-request")
    where = f"{request.method} {request.url.path}"
    response = problem_response(Problem.of(kind, str(error.detail), where))
    response.headers.update(error.headers or {})
    return response


async def _answer_failure(request: Request, error: Exception) -> JSONResponse:
    where = f"{request.method} {request.url.path}"
    detail = f"{type(error).__name__}; the server's log has the details"
    return problem_response(Problem.of("internal", detail, where))
