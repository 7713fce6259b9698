"""Problem documents, the form of each error of the server (RFC 9457, WIRE-05)."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rollout_server.serving.telemetry import CLIENT_GONE
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, PROBLEM_TITLES, Problem, ProblemError

RETRY_AFTER_S = 1
CLOSE = {"Connection": "close"}

# `where` can contain a key of the caller.
MAX_WHERE = 200

# Kinds of the statuses that the framework and the guards raise; these statuses have one kind each.
_KIND_OF_STATUS = {status: kind for kind, (status, _) in PROBLEM_TITLES.items()}


def install_problem_handlers(app: FastAPI) -> None:
    """Convert refusals, invalid calls, errors of the framework and failures to problems."""
    app.exception_handler(ProblemError)(answer_refusal)
    app.exception_handler(RequestValidationError)(_answer_invalid)
    app.exception_handler(HTTPException)(_answer_http)
    app.exception_handler(Exception)(_answer_failure)
    app.exception_handler(ClientDisconnect)(_answer_disconnect)


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    retry_after = {"Retry-After": str(RETRY_AFTER_S)} if problem.status == 429 else {}
    return JSONResponse(
        problem.model_dump(exclude_none=True),
        status_code=problem.status,
        headers={**retry_after, **(headers or {})},
        media_type=PROBLEM_MEDIA_TYPE,
    )


def problem_responses(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that answers these kinds of `PROBLEM_TITLES`."""
    content = {PROBLEM_MEDIA_TYPE: {"schema": Problem.model_json_schema()}}
    titles: dict[int, list[str]] = defaultdict(list)
    for kind in kinds:
        status, title = PROBLEM_TITLES[kind]
        titles[status].append(title)
    return {
        status: {"description": "; or: ".join(of_status), "content": content}
        for status, of_status in titles.items()
    }


async def answer_refusal(_: Request, error: ProblemError) -> JSONResponse:
    return problem_response(error.problem)


async def _answer_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    faults: dict[str, dict[str, Any]] = {}
    for item in error.errors():
        fault = _fault(item, error.body)
        known = faults.setdefault(fault["where"], fault)
        if fault["detail"] not in known["detail"]:  # from another member of a union
            known["detail"] += f", or: {fault['detail']}"
    kind = "bad-request" if error.errors()[0]["type"] == "json_invalid" else "invalid-request"
    errors = list(faults.values())
    first = errors[0]
    return problem_response(Problem.of(kind, first["detail"], first["where"], errors))


def _fault(item: dict[str, Any], body: Any) -> dict[str, Any]:
    """Return a pydantic error as `{where, detail}`, with `index` for an infer request.

    body: the JSON value of the call's body.
    """
    part, *loc = item["loc"]
    keys = _sent_keys(loc, body, is_missing=item["type"] == "missing") if part == "body" else loc
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    fault: dict[str, Any] = {
        "where": where.removeprefix(".")[:MAX_WHERE] or "body",
        "detail": str(item["msg"]).removeprefix("Value error, "),
    }
    if keys[:1] == ["infer_requests"] and len(keys) > 1 and isinstance(keys[1], int):
        fault["index"] = keys[1]
    return fault


def _sent_keys(loc: list[int | str], value: Any, *, is_missing: bool) -> list[int | str]:
    """Return the keys of `loc` that are in the body, without the names of union members.

    is_missing: the last key is not in the body.
    """
    keys: list[int | str] = []
    for place, key in enumerate(loc):
        try:
            value = value[key]
        except (TypeError, KeyError, IndexError):
            if not (is_missing and place == len(loc) - 1):
                continue
        keys.append(key)
    return keys


async def _answer_http(request: Request, error: HTTPException) -> JSONResponse:
    kind = _KIND_OF_STATUS.get(error.status_code, "bad-request")
    where = f"{request.method} {request.url.path}"
    return problem_response(Problem.of(kind, str(error.detail), where), error.headers)


async def _answer_failure(request: Request, error: Exception) -> JSONResponse:
    """The error goes on to uvicorn, which closes the connection."""
    where = f"{request.method} {request.url.path}"
    detail = f"{type(error).__name__}; the server's log has the details"
    return problem_response(Problem.of("internal", detail, where), CLOSE)


async def _answer_disconnect(_: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_GONE)
