"""The dashboard and the alerts against what a server really exposes."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import promql_parser as promql
import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from rollout_server.http.app import create_app
from rollout_server.runtime.refusals import refusal
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import CallRecord, Outcome, Phase, ReplicaLoad, Telemetry
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import PROBLEM_TITLES
from shared_contracts.server_info import TOKEN_VARIABLE, Health, ReplicaState, ReplicaStatus
from shared_contracts.weights import SyncReport, WeightState, WeightStatus

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "rollout-server.json"
TOKEN = "a-token-of-a-test"

# When each series began: Prometheus keeps that of counters by itself.
LEFT_OUT = {"_created"}
# Labels that Prometheus adds to what it scrapes, and its own series of a scrape.
SCRAPED = {"instance", "job"}
UP = "up"
# Of a push, as the server tells them (`SyncReport.seconds`).
PUSH_PHASES = ("pause", "transfer", "load", "verify", "caches")
UNITS = {"none", "short", "s", "reqps", "cps", "Bps", "percentunit"}


@dataclass
class Server:
    """One replica of each state; not ready."""

    def health(self) -> Health:
        raise refusal("not-ready", "replica 1 is dead", "replicas[1]")

    def replica_statuses(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(index=i, state=state, detail="", heartbeat_age_s=0.1, restarts=i)
            for i, state in enumerate(get_args(ReplicaState))
        ]

    def weights_status(self) -> WeightStatus:
        return WeightStatus(state="READY", weights_version=7, server_epoch="e")

    def loads(self) -> list[ReplicaLoad]:
        return [ReplicaLoad(index=0, running=64, waiting=8)]


@pytest.fixture(scope="module")
def series() -> dict[str, dict[str, set[str]]]:
    """Values of every label of every series of a server at which everything has happened."""
    telemetry = Telemetry()
    telemetry.watch(Server())
    for path in routes():
        for reason in PROBLEM_TITLES:
            telemetry.count_call(CallRecord(path, problem=reason))
    record = CallRecord("/infer/", status=200)
    record.seconds = dict.fromkeys(get_args(Phase), 0.5)
    telemetry.count_call(record)
    status = WeightStatus(state="READY", weights_version=1, server_epoch="e")
    telemetry.count_push(
        SyncReport(status=status, seconds=dict.fromkeys(PUSH_PHASES, 0.5), bytes=3, verified=2)
    )
    found: dict[str, dict[str, set[str]]] = {UP: {}}
    for family in text_string_to_metric_families(telemetry.exposition().decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    assert found["rollout_calls_total"]["outcome"] == set(get_args(Outcome))
    assert found["rollout_weights_state"]["state"] == set(get_args(WeightState))
    return found


def routes() -> set[str]:
    document: dict[str, Any] = create_app(Pool(settings())).openapi()
    return set(document["paths"])


def settings() -> ServerSettings:
    return ServerSettings(model=Path("/m"), device="cpu", replicas=1)


# --- what they ask for


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of all panels, annotations and alerts."""
    asked = [(p["title"], target["expr"]) for p in panels() for target in p["targets"]]
    marks = [(mark["name"], mark["expr"]) for mark in dashboard()["annotations"]["list"]]
    return [*asked, *marks, *((rule["alert"], rule["expr"]) for rule in rules())]


def parsed(expression: str) -> Any:
    return promql.parse(expression.replace("$__rate_interval", "5m"))


def nodes(expression: Any) -> list[Any]:
    found: list[Any] = []
    promql.walk(expression, pre_visit=found.append)
    return found


def selectors(expression: Any) -> Iterator[Any]:
    """Each with a name and matchers."""
    for node in nodes(expression):
        if isinstance(node, promql.VectorSelector):
            yield node
        elif isinstance(node, promql.MatrixSelector):
            yield node.vector_selector


ALL = expressions()


@pytest.mark.req("WIRE-06")
@pytest.mark.parametrize(
    ("where", "expression"), ALL, ids=[f"{n}-{w}" for n, (w, _) in enumerate(ALL)]
)
def test_expressions_name_only_series_and_labels_that_there_are(
    where: str, expression: str, series: dict[str, dict[str, set[str]]]
) -> None:
    found = list(selectors(parsed(expression)))
    assert found
    known: set[str] = set()
    for selector in found:
        assert selector.name in series, selector.name
        labels = series[selector.name]
        known |= labels.keys()
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels.keys() | SCRAPED, matcher.name
            if matcher.name in labels:
                assert_values(matcher, labels[matcher.name])
    for node in nodes(parsed(expression)):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= known | SCRAPED, node.modifier.labels


def assert_values(matcher: Any, values: set[str]) -> None:
    """A value that a label never has would make an empty panel, or an alert that cannot fire."""
    if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
        assert matcher.value in values, matcher.value
        return
    before, group, after = matcher.value.partition("(")
    inner, _, end = after.partition(")") if group else (before, "", "")
    wanted = {f"{before if group else ''}{word}{end}" for word in inner.split("|")}
    assert wanted <= values, wanted - values


@pytest.mark.req("WIRE-06")
def test_every_series_of_a_server_is_on_the_dashboard(
    series: dict[str, dict[str, set[str]]],
) -> None:
    on_it = {s.name for p in panels() for t in p["targets"] for s in selectors(parsed(t["expr"]))}
    seen = {stem(name) for name in on_it}
    missing = {
        name
        for name in series
        if stem(name) not in seen and not any(name.endswith(end) for end in LEFT_OUT)
    }
    assert missing == {UP}


def stem(name: str) -> str:
    """A histogram is three series."""
    for end in ("_bucket", "_sum", "_count"):
        name = name.removesuffix(end)
    return name


# --- the dashboard as Grafana takes it


def test_panels_lie_side_by_side_in_rows_of_24() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    height = 1 + max(y for _, y in taken)
    assert len(taken) == 24 * height, "no holes"


def test_panels_have_ids_titles_units_and_the_data_source_of_the_variable() -> None:
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for panel in panels():
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults.get("unit", "none") in UNITS, panel["title"]
        targets = panel["targets"]
        assert len({target["refId"] for target in targets}) == len(targets)
        for source in (panel["datasource"], *(target["datasource"] for target in targets)):
            assert source == {"type": "prometheus", "uid": "${datasource}"}
        for target in targets:
            assert target["legendFormat"]
            assert 'instance=~"$instance"' in target["expr"], panel["title"]


def test_the_variables_are_a_data_source_and_the_servers() -> None:
    source, servers = dashboard()["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    assert servers["query"]["query"] == "label_values(rollout_ready, instance)"
    assert servers["multi"]
    assert servers["includeAll"]


def test_states_are_named_by_the_numbers_that_the_expressions_make() -> None:
    """READY is 0, and of the others exactly one is 1 times its number."""
    wanted = {
        "State of each replica": set(get_args(ReplicaState)),
        "State of the weights": set(get_args(WeightState)),
        "Weights": set(get_args(WeightState)),
    }
    for panel in panels():
        if panel["title"] in wanted:
            (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
            names = [mapping["options"][str(n)]["text"] for n in range(len(mapping["options"]))]
            assert set(names) == wanted.pop(panel["title"])
            (target,) = panel["targets"]
            terms = target["expr"].split(" + ")
            for number, (name, term) in enumerate(zip(names[1:], terms, strict=True), start=1):
                assert f'state="{name}"' in term
                assert term.startswith("max" if number == 1 else f"{number} * max")
    assert wanted == {}


def test_grafana_finds_prometheus_and_the_dashboards_where_they_are_mounted() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "rollout-server.yaml").read_text())[
        "providers"
    ]
    services = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    assert source["isDefault"]


# --- the alerts, and the scrape


def test_alerts_say_what_they_are_about() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        kept = labels_after(parsed(rule["expr"]))
        for name in template_labels(" ".join(rule["annotations"].values())):
            assert name in kept, (rule["alert"], name)


def template_labels(text: str) -> set[str]:
    return {word.split()[0].rstrip("}") for word in text.split("$labels.")[1:]}


def labels_after(expression: Any) -> set[str]:
    """Labels that are sure to be left: those of the outermost aggregation, else of the series."""
    for node in nodes(expression):
        if isinstance(node, promql.AggregateExpr):
            return set(node.modifier.labels) if node.modifier is not None else set()
    return {"instance", "job", "replica"}


@pytest.mark.req("SRV-06", "WIRE-06")
def test_the_scrape_is_answered_with_the_token_of_the_secret_and_refused_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    services = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    assert (DEPLOY / "prometheus" / "alerts.yml").is_file()
    assert 'up{job="rollout-server"}' in {rule["expr"].partition(" ==")[0] for rule in rules()}
    assert job["job_name"] == "rollout-server"
    name, port = job["static_configs"][0]["targets"][0].split(":")
    assert port in services["services"][name]["expose"]
    (secret,) = services["services"]["prometheus"]["secrets"]
    assert job["authorization"] == {"type": "Bearer", "credentials_file": f"/run/secrets/{secret}"}
    assert f"--token-file=/run/secrets/{secret}" in services["services"][name]["command"]

    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    client = TestClient(create_app(Pool(settings())), base_url="http://127.0.0.1")
    headers = {"authorization": f"{job['authorization']['type']} {TOKEN}"}
    assert client.get(job["metrics_path"]).status_code == 401
    answer = client.get(job["metrics_path"], headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool here")
def test_promtool_takes_the_files_and_sees_the_alerts_fire() -> None:
    folder, tests = DEPLOY / "prometheus", Path(__file__).with_name("alert_rules.yml")
    for command in (
        ["check", "config", "--syntax-only", str(folder / "prometheus.yml")],
        ["check", "rules", str(folder / "alerts.yml")],
        ["test", "rules", str(tests)],
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
