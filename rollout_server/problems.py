"""Every error leaves the server as a problem document (WIRE-05)."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem, ProblemError

logger = logging.getLogger(__name__)

# A caller's own key, however long, is a part of the path to it.
MAX_WHERE = 200

_KIND_OF_STATUS = {404: "not-found", 405: "method-not-allowed", 413: "body-too-large"}


class BadRequest(Exception):
    """A fault inside one request of a call.

    where: the spot inside the request, such as `images[0]`; found: what is wrong there.
    """

    def __init__(self, where: str, found: str) -> None:
        super().__init__(where, found)
        self.where = where
        self.found = found


def refusal(kind: str, detail: str, where: str) -> ProblemError:
    """The exception of a problem of `kind` (`PROBLEM_TITLES`), to be raised."""
    return ProblemError(Problem.of(kind, detail, where))


def refuse_requests(faults: dict[int, BadRequest]) -> ProblemError:
    """The refusal of a whole call, with the index of every bad request."""
    errors = [
        {"index": index, "where": f"infer_requests[{index}].{fault.where}", "detail": fault.found}
        for index, fault in sorted(faults.items())
    ]
    first = errors[0]
    detail = f"{len(errors)} bad request(s), nothing was generated; the first: {first['detail']}"
    return ProblemError(Problem.of("invalid-request", detail, str(first["where"]), errors))


def install_problem_handlers(app: FastAPI) -> None:
    """Turn our refusals, FastAPI's validation errors and routing errors into problems."""
    app.add_exception_handler(ProblemError, _answer_refusal)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_failure)


def problem_response(problem: Problem) -> JSONResponse:
    """The answer that carries a problem, for what answers before the routes do."""
    return JSONResponse(
        problem.model_dump(exclude_none=True),
        status_code=problem.status,
        media_type=PROBLEM_MEDIA_TYPE,
    )


async def _answer_refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    return problem_response(error.problem)


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if error.errors()[0]["type"] == "model_attributes_type" and not _sent_as_json(request):
        detail = "it is not sent as JSON; give the header `content-type: application/json`"
        return problem_response(Problem.of("bad-request", detail, "body"))
    errors = [_fault(item) for item in error.errors()]
    kind = "bad-request" if error.errors()[0]["type"] == "json_invalid" else "invalid-request"
    first = errors[0]
    return problem_response(Problem.of(kind, first["detail"], first["where"], errors))


def _sent_as_json(request: Request) -> bool:
    return "json" in request.headers.get("content-type", "")


def _fault(item: dict[str, Any]) -> dict[str, Any]:
    """One of pydantic's errors as `{where, detail}` and, in an infer request, its `index`."""
    loc = tuple(item["loc"])
    loc = loc[1:] if loc and loc[0] in ("body", "query") else loc
    message = str(item["msg"]).removeprefix("Value error, ")
    where = dotted(loc)[:MAX_WHERE] or "body"
    fault: dict[str, Any] = {"where": where, "detail": message}
    if loc[:1] == ("infer_requests",) and len(loc) > 1 and isinstance(loc[1], int):
        fault["index"] = loc[1]
    return fault


def dotted(loc: tuple[int | str, ...]) -> str:
    """`("infer_requests", 3, "images")` as `infer_requests[3].images`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


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
