"""Scenarios of rollout backends: records and guard (seed 000)."""

import json

import pytest
from pydantic import ValidationError

from learner.rollout.backend import Journal
from learner.rollout.client import RolloutClient
from learner.rollout.policy import Policy, RequestSettings
from learner.rollout.server_pool import ServerPool
from learner.types import Sample
from shared_contracts.infer import RequestConfig
from shared_contracts.rollout_config import ServerAddress
from tests.unit.fleets import fleet
from tests.unit.scripted_server import INFER, ScriptedPusher


@pytest.mark.req("SEED-02")
def test_server_mode_logs_reproducibility_metadata() -> None:
    with fleet(2) as run:
        urls = [one.server.base_url for one in run.rollouts]
        servers = [ServerAddress(base_url=url, group_port=51216 + i) for i, url in enumerate(urls)]
        journal = Journal(servers, lambda: ("full", None))
        clients = [RolloutClient(url, timeout_s=60.0) for url in urls]
        pushers = [ScriptedPusher(one) for one in run.rollouts]
        backend = ServerPool(clients, pushers, 8, journal)
        asking = RequestSettings("Detect.", None, RequestConfig(max_tokens=9))
        backend.connect()
        policy = Policy(backend, asking)
        policy.push()
        policy.answer([Sample(str(i), (), 64, 64, ()) for i in range(4)], seed=1000)
        record, _ = policy.take_notes()
        policy.close()
    assert record["servers"] == [server.model_dump(mode="json") for server in servers]
    assert (record["sync_mode"], record["sync_fallback"]) == ("full", None)
    assert record["weights_version"] == 2
    assert [push["version"] for push in record["pushes"]] == [2, 2]
    assert {(call["attempt"], call["outcome"]) for call in record["calls"]} == {(1, "answered")}
    assert json.loads(json.dumps(record)) is not None
    calls = sorted(record["calls"], key=lambda call: int(call["first"]))
    assert [(c["server"], c["first"], c["count"], c["seed"]) for c in calls] == [
        (servers[0].base_url, 0, 2, 1000),
        (servers[1].base_url, 2, 2, 1002),
    ]
    assert record["decoding"] == {"max_tokens": 9}


@pytest.mark.req("REP-04", "WIRE-01")
def test_vllm_v1_rollout_does_not_rely_on_request_time_logits_processors() -> None:
    with fleet(1) as run:
        run.ask(1)
        (body,) = run.rollouts[0].server.bodies(INFER)
    assert "logits_processors" not in json.dumps(body)
    assert "repeat_terminate" not in json.dumps(body)
    with pytest.raises(ValidationError):
        RequestConfig.model_validate({"logits_processors": ["a.b:C"]})
