"""Request ids, expected weights and metrics of calls to a real server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from learner.rollout.server_process import free_ports
from tests.contract.running_server import RunningServer, image_request, text_request
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import push, weight_group
from tests.unit.fleets import wait_until

SAMPLED = {"temperature": 1.0, "max_tokens": 16}  # without a seed, so that answers differ


def post(server: RunningServer, requests: int = 1, **body: Any) -> httpx.Response:
    body = {"infer_requests": [text_request()] * requests, "request_config": SAMPLED} | body
    return server.http.post("/infer/", json=body)


def metrics(server: RunningServer) -> dict[str, float]:
    """Values by name, those with labels by name and the values of their labels."""
    answer = server.http.get("/metrics")
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


class Grown(dict[str, float]):
    """The growth of each counter over a block."""


@contextmanager
def growth(server: RunningServer) -> Iterator[Grown]:
    before, grown = metrics(server), Grown()
    yield grown
    grown |= {name: value - before.get(name, 0.0) for name, value in metrics(server).items()}


# --- request ids


@pytest.mark.req("DIST-05")
def test_repeated_call_joins_the_one_whose_connection_ended(server: RunningServer) -> None:
    requests, config = [text_request()] * 64, SAMPLED | {"max_tokens": 400}
    with growth(server) as grown:
        cut = server.begin_infer(requests, config, request_id="cut")
        server.wait_for_sequences(lambda running: running == 64)
        cut.close()
        wait_until(lambda: metrics(server)["rollout_calls_in_flight"] == 0)
        repeated = server.begin_infer(requests, config, request_id="cut")
        assert len(json.loads(repeated.getresponse().read())) == 64
        repeated.close()
    assert grown["rollout_requests_total"] == 64
    assert grown["rollout_calls_total gone"] == 1
    assert grown["rollout_calls_total repeated"] == 1


# --- weights


@pytest.mark.req("WIRE-03", "DIST-05")
def test_call_for_other_weights_is_refused_and_a_kept_answer_is_not(
    server: RunningServer, tied: Path
) -> None:
    old = server.http.get("/health/").json()["weights_version"]
    expecting = {"expected_weights_version": old}
    kept = post(server, request_id="before the push", **expecting)
    assert kept.status_code == 200, kept.text
    (port,) = free_ports(1)
    with weight_group(server.http, port) as sender, growth(server) as grown:
        report = push(server.http, sender, read_weights(tied), old + 1)
    assert grown["rollout_weight_pushes_total"] == 1
    assert grown["rollout_weight_push_bytes_total"] == report["bytes"]
    assert grown["rollout_weights_version"] == 1

    refused = post(server, **expecting)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:rollmatch:other-weights")
    assert refused.json()["where"] == "expected_weights_version"
    assert post(server, expected_weights_version=old + 1).status_code == 200
    assert post(server, request_id="before the push", **expecting).content == kept.content


# --- metrics


@pytest.mark.req("WIRE-06")
def test_metrics_count_answers(server: RunningServer, scene: Path) -> None:
    requests = [text_request(), image_request(str(scene))]
    with growth(server) as grown:
        envelopes = server.infer(requests, max_tokens=8)
    usages = [envelope["response"]["usage"] for envelope in envelopes]
    assert grown["rollout_calls_total answered"] == 1
    assert (grown["rollout_requests_total"], grown["rollout_images_total"]) == (2, 1)
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    assert grown["rollout_prompt_tokens_total"] == prompt_tokens
    assert grown["rollout_generated_tokens_total"] == 16
    assert grown["rollout_phase_seconds_count generate"] == 1
    now = metrics(server)
    assert now["rollout_ready"] == now["rollout_replica_state 0 serving"] == 1
