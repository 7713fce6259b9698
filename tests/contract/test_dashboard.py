"""The dashboard and the alerts ask only for series and labels that a server exposes."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import promql_parser as promql
import pytest
import yaml
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import CallRecord, Phase, Telemetry
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import PROBLEM_TITLES
from shared_contracts.server_info import ReplicaState, ReplicaStatus
from shared_contracts.weights import SyncReport, WeightStatus
from tests.contract.test_telemetry import ScriptedServer

DEPLOY = Path(__file__).parents[2] / "deploy"
STATUS = WeightStatus(state="READY", weights_version=1, server_epoch="e")
# Labels that Prometheus adds to what it scrapes.
SCRAPED = {"instance", "job"}
PUSH_PHASES = ("pause", "transfer", "finish")

Series = dict[str, dict[str, set[str]]]


def make_app() -> FastAPI:
    return create_app(Pool(ServerSettings(model=Path("/m"), device="cpu", replicas=1)))


@pytest.fixture(scope="module")
def series() -> Series:
    """The values of each label of each series, from a server that counted every kind of event."""
    telemetry = Telemetry()
    states = [
        ReplicaStatus(index=i, state=state, detail="", heartbeat_age_s=0.1, restarts=i)
        for i, state in enumerate(get_args(ReplicaState))
    ]
    telemetry.watch(ScriptedServer(ready=False, replicas=states))
    for path in make_app().openapi()["paths"]:
        for reason in PROBLEM_TITLES:
            telemetry.count_call(CallRecord(path, problem=reason))
    record = CallRecord("/infer/", status=200)
    record.seconds = dict.fromkeys(get_args(Phase), 0.5)
    telemetry.count_call(record)
    seconds = dict.fromkeys(PUSH_PHASES, 0.5)
    telemetry.count_push(SyncReport(status=STATUS, seconds=seconds, bytes=3))
    found: Series = {"up": {}}
    for family in text_string_to_metric_families(telemetry.exposition().decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of all panels, annotations and alerts."""
    dashboard = json.loads((DEPLOY / "grafana/dashboards/rollout-server.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    marks = [(mark["name"], mark["expr"]) for mark in dashboard["annotations"]["list"]]
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    return [*asked, *marks, *((rule["alert"], rule["expr"]) for rule in rules)]


def faults(expression: str, series: Series) -> list[str]:
    """Series, labels and label values of an expression that no server has."""
    found, selectors = list[str](), list[Any]()
    query = promql.parse(expression.replace("$__rate_interval", "5m"))
    promql.walk(query, lambda node: selectors.append(node) if hasattr(node, "matchers") else None)
    for selector in selectors:
        labels = series.get(str(selector.name), {})
        found += [] if selector.name in series else [selector.name]
        for matcher in selector.matchers.matchers:
            values = labels.get(matcher.name, set())
            if matcher.name not in SCRAPED and not any(
                re.fullmatch(matcher.value, v) for v in values
            ):
                found.append(f"{matcher.name}={matcher.value}")
    return found


@pytest.mark.req("WIRE-06")
def test_panels_and_alerts_name_only_series_and_labels_that_exist(series: Series) -> None:
    asked = expressions()
    assert len(asked) > 20
    assert [(where, wrong) for where, e in asked if (wrong := faults(e, series))] == []


@pytest.mark.req("SRV-06", "WIRE-06")
def test_prometheus_scrapes_the_server_with_its_token() -> None:
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
    assert job["metrics_path"] in make_app().openapi()["paths"]
