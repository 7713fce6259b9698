"""The dashboard and the alerts ask only for series that a server exposes."""

import re
from pathlib import Path

import pytest
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
