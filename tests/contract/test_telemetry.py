"""What is counted and logged of calls, without an engine."""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from rollout_server.http.app import create_app
from rollout_server.http.middleware import log_call
from rollout_server.runtime.refusals import refusal
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import CallRecord, Outcome, ReplicaLoad, Telemetry
from rollout_server.settings.options import ServerSettings
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.server_info import Health, ReplicaStatus
from shared_contracts.weights import SyncReport, WeightStatus

SECRET = "do-not-log-this"


SETTINGS = ServerSettings(model=Path("/m"), device="cpu", replicas=2)


@pytest.fixture
def client(caplog: pytest.LogCaptureFixture) -> TestClient:
    """A server whose engines have not started."""
    caplog.set_level(logging.INFO)
    return TestClient(create_app(Pool(SETTINGS)), base_url="http://127.0.0.1")


def samples(exposition: str) -> dict[str, float]:
    """Values by name and labels, such as `rollout_calls_total{outcome=gone}`."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            values[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return values


def access_lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.name == "rollout_server.access"]


# --- metrics


@pytest.mark.req("WIRE-06")
def test_a_starting_server_can_be_scraped(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = samples(answer.text)
    assert found["rollout_ready"] == 0
    assert found["rollout_replica_state{replica=1,state=starting}"] == 1
    assert found["rollout_replica_state{replica=1,state=serving}"] == 0
    assert found["rollout_weights_version"] == 0
    assert found["rollout_calls_total{outcome=answered}"] == 0


@dataclass
class ScriptedServer:
    ready: bool = True
    state: Any = "READY"
    replicas: list[ReplicaStatus] = field(
        default_factory=lambda: [
            ReplicaStatus(index=0, state="serving", detail="", heartbeat_age_s=0.1, restarts=0),
            ReplicaStatus(index=1, state="dead", detail="gone", heartbeat_age_s=None, restarts=2),
        ]
    )

    def health(self) -> Health:
        if not self.ready:
            raise refusal("not-ready", "replica 1 is dead", "replicas[1]")
        return Health(state="READY", weights_version=7, server_epoch="e", replicas=self.replicas)

    def replica_statuses(self) -> list[ReplicaStatus]:
        return self.replicas

    def weights_status(self) -> WeightStatus:
        return WeightStatus(state=self.state, weights_version=7, server_epoch="e")

    def loads(self) -> list[ReplicaLoad]:
        return [ReplicaLoad(index=0, running=64, waiting=8)]


@pytest.mark.req("WIRE-06")
def test_gauges_show_the_server_as_it_is_at_every_scrape() -> None:
    server, telemetry = ScriptedServer(), Telemetry()
    telemetry.watch(server)
    found = samples(telemetry.exposition().decode())
    assert found["rollout_ready"] == 1
    assert found["rollout_running_sequences{replica=0}"] == 64
    assert found["rollout_waiting_sequences{replica=0}"] == 8
    assert found["rollout_replica_state{replica=1,state=dead}"] == 1
    assert found["rollout_replica_restarts{replica=1}"] == 2
    assert found["rollout_weights_version"] == 7
    assert found["rollout_weights_state{state=READY}"] == 1
    server.ready, server.state = False, "POISONED"
    found = samples(telemetry.exposition().decode())
    assert found["rollout_ready"] == 0
    assert found["rollout_weights_state{state=POISONED}"] == 1
    assert found["rollout_weights_state{state=READY}"] == 0


def test_seconds_that_several_requests_spend_in_one_phase_count_once() -> None:
    record, began = CallRecord("/infer/"), time.monotonic()
    with record.phase("prepare"):
        with record.phase("prepare"), record.phase("generate"):
            time.sleep(0.02)
        assert set(record.seconds) == {"generate"}
    assert 0.02 <= record.seconds["prepare"] <= time.monotonic() - began


def envelope(terminated: list[int], versions: tuple[int, int]) -> RolloutEnvelope:
    choices = [
        {"index": i, "message": {"content": SECRET}, "finish_reason": "stop"} for i in range(2)
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 30, "total_tokens": 40}
    return RolloutEnvelope.model_validate(
        {
            "response": {
                "model": "m",
                "choices": choices,
                "usage": usage,
                "id": "i",
                "created": 0,
            },
            "coordexp": {
                "repeat_terminate_triggered": int(bool(terminated)),
                "repeat_terminated_choices": terminated,
                "weights_version": versions,
                "server_epoch": "e",
                "seed": None,
                "finish": "stop",
            },
        }
    )


def answered_call() -> CallRecord:
    record = CallRecord(
        "/infer/", request_id="id 1\nx", requests=2, images=1, prompt_tokens=20, status=200
    )
    record.seconds = {"wait": 0.0, "prepare": 0.25, "generate": 3.0}
    record.add_answers([envelope([0, 1], (7, 7)), envelope([], (7, 8))])
    return record


def test_tokens_images_triggers_and_seconds_are_counted() -> None:
    telemetry, record = Telemetry(), answered_call()
    telemetry.count_answers(record)
    telemetry.count_call(record)
    found = samples(telemetry.exposition().decode())
    assert found["rollout_calls_total{outcome=answered}"] == 1
    assert found["rollout_requests_total"] == 2
    assert found["rollout_images_total"] == 1
    assert found["rollout_prompt_tokens_total"] == 20
    assert found["rollout_generated_tokens_total"] == 60
    assert found["rollout_repeat_guard_triggers_total"] == 2
    assert found["rollout_phase_seconds_sum{phase=generate}"] == 3.0
    assert found["rollout_phase_seconds_bucket{le=0.25,phase=prepare}"] == 1


@pytest.mark.parametrize(
    ("status", "repeated", "outcome"),
    [
        (200, False, "answered"),
        (200, True, "repeated"),
        (422, False, "refused"),
        (503, False, "failed"),
        (499, False, "gone"),
    ],
)
def test_calls_are_counted_by_outcome(status: int, repeated: bool, outcome: Outcome) -> None:
    telemetry = Telemetry()
    telemetry.count_call(CallRecord("/infer/", status=status, repeated=repeated))
    found = samples(telemetry.exposition().decode())
    ended = {name: value for name, value in found.items() if name.startswith("rollout_calls_total")}
    assert {name for name, value in ended.items() if value} == {
        f"rollout_calls_total{{outcome={outcome}}}"
    }


@pytest.mark.req("SYNC-10")
def test_pushes_are_counted_with_their_phases() -> None:
    telemetry = Telemetry()
    status = WeightStatus(state="READY", weights_version=1, server_epoch="e")
    telemetry.count_push(
        SyncReport(status=status, seconds={"pause": 0.5, "transfer": 1.5}, bytes=300, verified=2)
    )
    found = samples(telemetry.exposition().decode())
    assert found["rollout_weight_pushes_total"] == 1
    assert found["rollout_weight_push_bytes_total"] == 300
    assert found["rollout_weight_push_seconds_sum{phase=transfer}"] == 1.5


# --- refusals and the access log


START = {
    "version": 1,
    "parameters": [{"name": "a", "dtype": "float32", "shape": [1]}],
    "attempt": None,
}


@pytest.mark.req("SRV-08")
def test_a_refused_call_is_logged_and_counted_with_its_problem(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    message = {"role": "user", "content": SECRET}
    body = {"infer_requests": [{"messages": [message], "images": [SECRET]}], "request_id": "r"}
    client.post("/infer", json=body | {"surprise": SECRET}, headers={"authorization": SECRET})
    client.post("/infer/", json=body, headers={"authorization": SECRET})
    client.get("/infer/")
    client.post("/start_weight_update/", json=START)
    client.post("/keep_communicator/", json={"attempt": "a"})
    client.get("/health/")
    assert [(r.route, r.status, r.problem) for r in access_lines(caplog)] == [
        ("/infer/", 422, "invalid-request"),
        ("/infer/", 503, "not-ready"),
        ("/infer/", 405, "method-not-allowed"),
        ("/start_weight_update/", 503, "not-ready"),
        ("/keep_communicator/", 503, "not-ready"),
    ]
    assert SECRET not in caplog.text
    found = samples(client.get("/metrics/").text)
    assert found["rollout_refused_total{reason=invalid-request,route=/infer/}"] == 1
    assert found["rollout_refused_total{reason=not-ready,route=/start_weight_update/}"] == 1
    assert found["rollout_calls_total{outcome=refused}"] == 2
    assert found["rollout_calls_total{outcome=failed}"] == 1
    assert found["rollout_calls_in_flight"] == 0


@pytest.mark.req("SRV-08")
def test_an_answered_call_is_one_line_with_its_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_call(answered_call())
    (line,) = access_lines(caplog)
    assert (line.requests, line.images, line.prompt_tokens) == (2, 1, 20)
    assert (line.generated_tokens, line.guard_triggers) == (60, 2)
    assert (line.weights_version, line.request_id) == ("7-8", "id 1\nx")
    text = line.getMessage()
    assert "\n" not in text
    assert text.startswith("route=/infer/ status=200 outcome=answered seconds=")
    assert text.endswith("weights_version=7-8 request_id='id 1\\nx'")
    assert "prepare_seconds=0.25" in text
    assert SECRET not in caplog.text


class BrokenPool(Pool):
    async def infer(self, call: InferCall, record: CallRecord) -> list[RolloutEnvelope]:
        raise RuntimeError("boom")


@pytest.mark.req("SRV-08")
def test_a_failure_of_the_server_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = TestClient(
        create_app(BrokenPool(SETTINGS)), base_url="http://127.0.0.1", raise_server_exceptions=False
    )
    assert client.post("/infer/", json={"infer_requests": []}).status_code == 500
    (line,) = access_lines(caplog)
    assert (line.status, line.problem, line.outcome) == (500, "internal", "failed")
