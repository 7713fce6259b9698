"""What is noted of calls and pushes, page by page, and where it is written."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from learner.rollout.backend import Call, Journal
from learner.rollout.client import RolloutClient
from learner.rollout.policy import Asking, OpenBackend, Policy
from learner.rollout.server import ServerBackend
from learner.training.run_log import CallLog
from learner.types import Sample
from shared_contracts.errors import RunError
from shared_contracts.infer import RequestConfig
from shared_contracts.rollout_config import ServerAddress
from tests.unit.scripted_rollouts import ScriptedChannel, ScriptedRollouts, report
from tests.unit.scripted_server import scripted_server

A, B = "http://a:1", "http://b:2"
ADDRESSES = (ServerAddress(base_url=A, group_port=7), ServerAddress(base_url=B, group_port=8))


@dataclass
class Adapter:
    mode: str = "adapter"
    fallback: str | None = None


def call(server: str, first: int = 0, attempt: int = 1, outcome: str = "answered") -> Call:
    return Call(server, first, count=3, seed=100 + first, attempt=attempt, outcome=outcome)


@pytest.mark.req("SEED-02")
def test_a_page_tells_what_is_needed_to_repeat_a_rollout() -> None:
    journal = Journal(ADDRESSES, Adapter())
    journal.call(call(A, outcome="POST http://a:1/infer/: timed out"))
    journal.call(call(A, attempt=2))
    journal.push(A, False, report(5, "p-0"))
    record, _ = journal.take()
    assert record["servers"] == [
        {"base_url": A, "group_port": 7},
        {"base_url": B, "group_port": 8},
    ]
    assert (record["sync_mode"], record["sync_fallback"]) == ("adapter", None)
    assert record["calls"] == [
        {
            "server": A,
            "first": 0,
            "count": 3,
            "seed": 100,
            "attempt": attempt,
            "outcome": outcome,
        }
        for attempt, outcome in ((1, "POST http://a:1/infer/: timed out"), (2, "answered"))
    ]
    assert record["pushes"][0]["version"] == 5
    assert json.loads(json.dumps(record)) is not None


@pytest.mark.req("DIST-05", "SYNC-10")
def test_metrics_count_the_page_and_time_its_slowest_push() -> None:
    journal = Journal(ADDRESSES)
    journal.call(call(A))
    journal.call(call(A, attempt=2))
    journal.call(call(B, attempt=3))
    journal.lost(A, "gone")
    journal.split(B, range(3, 5))
    journal.push(A, False, report(5, "p-0", seconds=2.0))
    journal.push(B, True, report(5, "p-0", seconds=8.0, size=6_000_000_000))
    journal.healthy = 1
    _, payload = journal.take()
    assert payload.metrics() == {
        "rollout/servers_healthy": 1,
        "rollout/servers_lost": 1,
        "rollout/retries": 2,
        "rollout/splits": 1,
        "sync/pushes": 2,
        "sync/repushes": 1,
        "sync/fell_back": 0.0,
        "sync/load_s": 0.1,
        "sync/send_s": 2.0,
        "sync/total_s": 8.0,
        "sync/bytes": 6_000_000_000,
        "sync/gb_per_s": 3.0,
    }


@pytest.mark.req("SYNC-10")
def test_a_phase_that_only_another_version_of_the_server_knows_stops_nobody() -> None:
    journal = Journal(ADDRESSES)
    pushed = report(5, "p-0")
    pushed.seconds["warp"] = 3.0
    journal.push(A, False, pushed)
    record, payload = journal.take()
    assert record["pushes"][0]["seconds"]["warp"] == 3.0
    assert "sync/warp_s" not in payload.metrics()
    assert payload.metrics()["sync/load_s"] == 0.1


@pytest.mark.req("MET-01")
def test_nothing_is_carried_over_to_the_next_page() -> None:
    journal = Journal(ADDRESSES)
    record, payload = journal.take()
    journal.call(call(A, attempt=2))
    journal.push(A, True, report(5, "p-0"))
    journal.lost(A, "gone")
    journal.split(B, range(2))
    journal.take()
    again, counted = journal.take()
    assert (again, counted.metrics()) == (record, payload.metrics())
    assert not any(record[key] for key in ("calls", "pushes", "lost", "splits"))
    assert counted.metrics()["rollout/servers_healthy"] == 2


@pytest.mark.req("SYNC-01", "SEED-02")
def test_a_fallback_stays_noted() -> None:
    sync = Adapter()
    journal = Journal(ADDRESSES, sync)
    sync.mode, sync.fallback = "full", "RuntimeError: no such layer"
    for _ in range(2):
        record, payload = journal.take()
        assert (record["sync_mode"], record["sync_fallback"]) == ("full", sync.fallback)
        assert payload.metrics()["sync/fell_back"] == 1.0


@pytest.mark.req("SEED-02", "DIST-05")
def test_the_notes_of_a_policy_are_those_of_its_servers_with_how_it_decodes() -> None:
    with scripted_server() as server:
        rollouts = ScriptedRollouts(server)
        rollouts.faults.append(ScriptedRollouts.restart)
        channel, journal = ScriptedChannel(rollouts), Journal()
        client = RolloutClient(server.base_url)
        backend = ServerBackend([client], [channel], 3, journal, sleep=lambda _: None)
        asking = Asking("Detect.", None, RequestConfig(max_tokens=9, temperature=0.5, top_k=3))
        backend.connect()
        policy = Policy(OpenBackend(backend, backend.version, journal=journal), asking)
        policy.push_if_stale()
        policy.answer([Sample(str(i), (), 64, 64, ()) for i in range(3)], seed=40)
        record, payload = policy.take_notes()
        policy.close()
    metrics = payload.metrics()
    assert record["weights_version"] == 1
    assert record["decoding"] == {"max_tokens": 9, "temperature": 0.5, "top_k": 3}
    assert (metrics["sync/pushes"], metrics["sync/repushes"]) == (2, 1)
    calls: list[dict[str, Any]] = record["calls"]
    assert {made["server"] for made in calls} == {server.base_url}
    answered = [made for made in calls if made["outcome"] == "answered"]
    assert [(c["first"], c["count"], c["seed"]) for c in answered] == [(0, 3, 40)]
    assert [made["attempt"] for made in calls if made["first"] == 0] == list(
        range(1, len(calls) + 1)
    )
    assert len(record["lost"]) == 1


@pytest.mark.req("DIST-05")
def test_a_rollout_that_fails_leaves_its_notes() -> None:
    with scripted_server() as server:
        rollouts = ScriptedRollouts(server)
        channel, journal = ScriptedChannel(rollouts), Journal()
        client = RolloutClient(server.base_url, timeout_s=0.1)
        backend = ServerBackend([client], [channel], 2, journal, sleep=lambda _: None)
        asking = Asking("Detect.", None, RequestConfig())
        backend.connect()
        policy = Policy(OpenBackend(backend, backend.version, journal=journal), asking)
        policy.push_if_stale()
        rollouts.dead = True
        with pytest.raises(RunError, match="waited"):
            policy.answer([Sample("0", (), 64, 64, ())], seed=40)
        record, _ = policy.take_notes()
    assert {made["outcome"] for made in record["calls"]} != {"answered"}
    assert record["lost"][0][0] == server.base_url


@pytest.mark.req("SEED-02")
def test_records_are_lines_of_a_file(tmp_path: Path) -> None:
    log = CallLog(tmp_path)
    records: list[dict[str, Any]] = [{"step": step, "calls": []} for step in (3, 5)]
    for record in records:
        log.write(record)
    lines = (tmp_path / "rollout_calls.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records
