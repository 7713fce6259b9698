"""The OpenAPI document as a source of calls, and what must hold of every answer to one."""

from pathlib import Path
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from learner.rollout.server_process import free_ports
from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import PROBLEM_MEDIA_TYPE

DOCUMENT = create_app(Pool(ServerSettings(model=Path("/m"), device="cpu"))).openapi()
schema = schemathesis.openapi.from_dict(DOCUMENT)

# Forming a weight group needs a learner, and none comes: the server is a gateway to it.
GATEWAY = ("/init_communicator/",)


def no_server_error(_: CheckContext, response: Response, case: Case[Any]) -> None:
    """The server is ready, so nothing excuses a 5xx but a learner that is missing."""
    allowed = {502, 504} if case.operation.path in GATEWAY else set()
    assert response.status_code < 500 or response.status_code in allowed, response.text


def errors_are_problems(_: CheckContext, response: Response, case: Case[Any]) -> None:
    if response.status_code >= 400:
        assert response.headers["content-type"] == [PROBLEM_MEDIA_TYPE]


CHECKS: list[Any] = [
    no_server_error,
    errors_are_problems,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


def made_short(body: Any) -> Any:
    """The same body, but for numbers that would make the server work for long."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    if isinstance(timeout_s := body.get("timeout_s", 240.0), int | float) and "host" in body:
        body["timeout_s"] = min(timeout_s, 0.1)
    if type(body.get("port")) is int and 1 <= body["port"] < 2**16:
        (body["port"],) = free_ports(1)  # the server waits for one that is taken
    if isinstance(body.get("infer_requests"), list):
        body["infer_requests"] = body["infer_requests"][:4]
        config = body.get("request_config")
        if config is None:
            body["request_config"] = {"max_tokens": 2}
        elif isinstance(config, dict):
            body["request_config"] = config | {
                "max_tokens": _at_most(2, config.get("max_tokens", 2)),
                "n": _at_most(4, config.get("n", 1)),
            }
    return body


def _at_most(bound: int, value: Any) -> Any:
    if value is None:
        return bound
    return min(bound, value) if type(value) in (int, float) else value
