"""The dashboard and the alerts ask only for series that a server exposes."""

import re
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from rollout_server.http.app import create_app
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
ASKING = ("grafana/dashboards/rollout-server.json", "prometheus/alerts.yml")


@pytest.fixture(scope="module")
def client() -> TestClient:
    """A client of a server whose engines have not started."""
    app = create_app(Pool(ServerSettings(model=Path("/m"), device="cpu", replicas=1)))
    return TestClient(app, base_url="http://127.0.0.1")


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
