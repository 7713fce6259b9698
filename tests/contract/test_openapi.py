"""The OpenAPI document, and a property-based run of it against a real server (WIRE-07)."""

import subprocess
import sys
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

from rollout_server.app import create_app
from rollout_server.pool import Pool
from rollout_server.settings import ServerSettings
from shared_contracts.errors import PROBLEM_MEDIA_TYPE
from tests.contract.running_server import RunningServer

DOCUMENT = create_app(Pool(ServerSettings(model=Path("/m"), device="cpu"))).openapi()
schema = schemathesis.openapi.from_dict(DOCUMENT)

# Forming a weight group needs a learner, and none comes: the server is a gateway to it.
GATEWAY = ("/init_communicator/",)


def no_server_error(_: CheckContext, response: Response, case: Case[Any]) -> None:
    """The shared server is ready, so nothing excuses a 5xx but a learner that is missing."""
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


@pytest.mark.req("WIRE-07")
def test_the_document_is_openapi() -> None:
    schema.validate()
    assert DOCUMENT["openapi"].startswith("3.1")


@pytest.mark.req("WIRE-07")
@schema.parametrize()
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_no_call_breaks_the_server_and_no_answer_is_undeclared(
    case: Case[Any], server: RunningServer
) -> None:
    case.body = made_short(case.body)
    case.call_and_validate(base_url=server.process.base_url, checks=CHECKS, timeout=60)


@pytest.mark.req("WIRE-07")
def test_the_server_serves_this_document_and_is_as_ready_as_before(server: RunningServer) -> None:
    assert server.http.get("/openapi.json").json() == DOCUMENT
    health = server.http.get("/health/")
    assert (health.status_code, health.json()["state"]) == (200, "READY")


@pytest.mark.req("WIRE-07")
def test_the_reference_page_is_up_to_date() -> None:
    script = Path(__file__).parents[2] / "scripts/api_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_route_says_what_it_does() -> None:
    operations = [op for methods in DOCUMENT["paths"].values() for op in methods.values()]
    assert all(operation.get("description") for operation in operations)
