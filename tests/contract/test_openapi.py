"""The OpenAPI document and property-based calls from it to a real server (WIRE-07).

`make reliability` runs this file with 20,000 examples of each operation.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from schemathesis import Case

from tests.contract.openapi_calls import CHECKS, DOCUMENT, made_short, schema
from tests.contract.running_server import RunningServer


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
