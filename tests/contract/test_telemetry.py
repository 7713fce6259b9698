"""Metrics with their dashboard and alerts, access log and log formats, without an engine."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.http.access_log import log_call
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import COUNTS, CallRecord, Telemetry
from shared_contracts.server_info import ReplicaStatus
from tests.contract.running_server import samples
from tests.contract.served_app import client_of, settings
from tests.contract.test_app import BODIES

SECRET = "do-not-log-this"
SETTINGS = settings(replicas=2)
DEPLOY = Path(__file__).parents[2] / "deploy"
ASKING = ("grafana/dashboards/rollout-server.json", "prometheus/alerts.yml")


@pytest.fixture
def client(caplog: pytest.LogCaptureFixture) -> TestClient:
    caplog.set_level(logging.INFO)
    return client_of(replicas=2)


def access_lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.name == "rollout_server.access"]


# --- metrics


@pytest.mark.req("WIRE-06")
def test_gauges_show_the_current_state_of_the_server() -> None:
    telemetry = Telemetry()
    dead = ReplicaStatus(index=1, state="dead", detail="gone", heartbeat_age_s=None, restarts=2)
    info = Pool(SETTINGS).info().model_copy(update={"weights_version": 7, "replicas": [dead]})
    found = samples(telemetry.exposition(info, True, {0: 72}).decode())
    assert found["rollout_ready"] == 1
    assert found["rollout_running_sequences{replica=0}"] == 64
    assert found["rollout_waiting_sequences{replica=0}"] == 8
    assert found["rollout_replica_state{replica=1,state=dead}"] == 1
    assert found["rollout_replica_restarts{replica=1}"] == 2
    assert found["rollout_weights_version"] == 7
    assert found["rollout_weights_state{state=READY}"] == 1
    broken = info.model_copy(update={"weights_state": "PUSH_NEEDED"})
    found = samples(telemetry.exposition(broken, False, {}).decode())
    assert found["rollout_ready"] == 0
    assert found["rollout_weights_state{state=PUSH_NEEDED}"] == 1
    assert found["rollout_weights_state{state=READY}"] == 0
    assert "rollout_running_sequences{replica=0}" not in found


@pytest.mark.req("WIRE-06")
def test_panels_and_alerts_name_only_series_that_exist(client: TestClient) -> None:
    """A series with labels has no sample before the first event; `# TYPE` has its name."""
    series = set[str]()
    for family in text_string_to_metric_families(client.get("/metrics/").text):
        total = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        series |= {family.name + end for end in total.get(family.type, [""])}
    for name in ASKING:
        asked = set(re.findall(r"\brollout_(?!matching)\w+", (DEPLOY / name).read_text()))
        assert asked, name
        assert asked <= series, name


@pytest.mark.req("SRV-06", "WIRE-06")
def test_prometheus_scrapes_the_server_with_its_token(client: TestClient) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    services = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())["services"]
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    (secret,) = services["prometheus"]["secrets"]
    assert port in services[host]["expose"]
    assert f"--token-file=/run/secrets/{secret}" in services[host]["command"]
    assert job["authorization"] == {"type": "Bearer", "credentials_file": f"/run/secrets/{secret}"}
    assert config["rule_files"] == ["alerts.yml"]
    assert "./prometheus:/etc/prometheus:ro" in services["prometheus"]["volumes"]
    assert client.get(job["metrics_path"]).status_code == 200


# --- refusals and the access log


@pytest.mark.req("SRV-08")
def test_refused_call_is_logged_and_counted_with_its_problem(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    message = {"role": "user", "content": SECRET}
    body = {"infer_requests": [{"messages": [message], "images": [SECRET]}], "request_id": "r"}
    client.post("/infer", json=body | {"surprise": SECRET}, headers={"authorization": SECRET})
    client.post("/infer/", json=body, headers={"authorization": SECRET})
    client.get("/infer/")
    client.post("/start_weight_update/", json=BODIES["/start_weight_update/"] | {"attempt": "a"})
    client.post("/close_communicator/", json={"attempt": "a"})
    client.get("/health/")
    assert [(r.route, r.status, r.problem) for r in access_lines(caplog)] == [
        ("/infer/", 422, "invalid-request"),
        ("/infer/", 503, "not-ready"),
        ("/infer/", 405, "method-not-allowed"),
        ("/start_weight_update/", 503, "not-ready"),
        ("/close_communicator/", 503, "not-ready"),
    ]
    assert access_lines(caplog)[1].request_id == "r"
    assert SECRET not in caplog.text
    found = samples(client.get("/metrics/").text)
    assert found["rollout_refused_total{reason=invalid-request,route=/infer/}"] == 1
    assert found["rollout_refused_total{reason=not-ready,route=/start_weight_update/}"] == 1
    assert found["rollout_calls_total{outcome=refused}"] == 2
    assert found["rollout_calls_total{outcome=failed}"] == 1
    assert found["rollout_calls_in_flight"] == 0


@pytest.mark.req("SRV-08")
def test_answered_call_is_one_line_with_its_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    record = CallRecord("/infer/", request_id="id 1\nx", requests=2, images=1, status=200)
    record.seconds = {"wait": 0.0, "prepare": 0.25, "generate": 3.0}
    record.prompt_tokens, record.generated_tokens, record.guard_triggers = 20, 60, 2
    record.weights_version = (7, 8)
    log_call(record)
    (line,) = access_lines(caplog)
    assert (line.requests, line.images, line.prompt_tokens) == (2, 1, 20)
    assert (line.generated_tokens, line.guard_triggers) == (60, 2)
    assert (line.weights_version, line.request_id) == ("7-8", "id 1\nx")
    text = line.getMessage()
    assert "\n" not in text
    assert text.startswith("route=/infer/ status=200 outcome=answered seconds=")
    assert text.endswith("weights_version=7-8 request_id='id 1\\nx'")
    assert "prepare_seconds=0.25" in text
    log_call(CallRecord("/v1/chat/completions/", seconds=record.seconds, status=200))
    assert "prepare_seconds=0.25" in caplog.messages[-1]
    assert not any(f"{name}=" in caplog.messages[-1] for name in COUNTS)


# --- logs of all libraries


# Sets up the logs of a server without an engine, then the logs of vLLM. test_calls.py reads lines
# of text.
SERVER = """
import logging
import warnings
import torch
from rollout_server.runtime.logs import set_up_logging, take_over_torch

set_up_logging("info", "json")
take_over_torch()
logging.getLogger("rollout_server.access").info("a call", extra={"route": "/infer/"})
logging.getLogger("rollout_server.serve").debug("hidden")
for library in ("httpx", "httpcore.connection"):  # these would log the signed URL of an image
    logging.getLogger(library).info("GET http://images/cat.png?signature=hidden")

import transformers
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging, init_logger

logging.captureWarnings(False)  # as in a fresh engine process
configure_logging(LoggingConfig())
init_logger("vllm.engine").info("first\\nsecond \\x1b %s", "é")
init_logger("vllm.engine").debug("hidden")
transformers.logging.get_logger("transformers.x").warning("from transformers")
logging.getLogger("torch.x").warning("from torch")
warnings.warn("a warning")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("rollout_server.serve").exception("it failed")
"""


@pytest.mark.slow
@pytest.mark.req("SRV-08")
def test_every_line_of_every_library_is_one_json_object() -> None:
    settings = SETTINGS.model_copy(update={"log_format": "json"})
    command, environ = [sys.executable, "-c", SERVER], os.environ | engine_environment(settings)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "pid", "message"} <= set(line)
    by_logger = {line["logger"]: line for line in lines}
    assert by_logger["rollout_server.access"]["route"] == "/infer/"
    assert by_logger["vllm.engine"]["message"] == "first\nsecond \x1b é"
    assert by_logger["transformers.x"]["message"] == "from transformers"
    assert by_logger["torch.x"]["level"] == "WARNING"
    assert "a warning" in by_logger["py.warnings"]["message"]
    assert not {"httpx", "httpcore.connection"} & set(by_logger)
    assert "hidden" not in done.stderr
    failure = by_logger["rollout_server.serve"]
    assert failure["message"] == "it failed"
    assert failure["exception"].endswith("ZeroDivisionError: division by zero")
