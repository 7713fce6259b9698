"""The OpenAPI document and property-based calls from it to a real server (WIRE-07).

`make reliability` runs this file with 20,000 examples of each operation.
"""

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
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
from tests.contract.running_server import RunningServer

DOCUMENT = create_app(Pool(ServerSettings(model=Path("/m"), device="cpu"))).openapi()
schema = schemathesis.openapi.from_dict(DOCUMENT)


def errors_are_problems(_: CheckContext, response: Response, case: Case[Any]) -> None:
    """And none is a 5xx, but for the learner that does not come to a weight group."""
    gateway = case.operation.path == "/init_communicator/" and response.status_code in (502, 504)
    assert response.status_code < 500 or gateway, response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == [PROBLEM_MEDIA_TYPE]


CHECKS: list[Any] = [
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
        config = body.get("request_config") or {}
        if isinstance(config, dict):
            body["request_config"] = {**config}
            for name, most in (("max_tokens", 2), ("n", 4)):
                value = most if config.get(name) is None else config[name]
                if type(value) in (int, float):
                    body["request_config"][name] = min(most, value)
    return body


@pytest.mark.req("WIRE-07")
def test_document_is_openapi() -> None:
    schema.validate()
    assert DOCUMENT["openapi"].startswith("3.1")
    operations = [op for methods in DOCUMENT["paths"].values() for op in methods.values()]
    assert all(operation.get("description") for operation in operations)


@pytest.mark.req("WIRE-07")
@schema.parametrize()
@settings(suppress_health_check=list(HealthCheck))
def test_no_call_breaks_the_server_and_no_answer_is_undeclared(
    case: Case[Any], server: RunningServer
) -> None:
    case.body = made_short(case.body)
    case.call_and_validate(base_url=server.process.base_url, checks=CHECKS, timeout=60)


@pytest.mark.req("WIRE-07")
def test_server_serves_this_document_and_is_still_ready(server: RunningServer) -> None:
    assert server.http.get("/openapi.json").json() == DOCUMENT
    health = server.http.get("/health/")
    assert (health.status_code, health.json()["state"]) == (200, "READY")
