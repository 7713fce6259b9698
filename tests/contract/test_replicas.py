"""Two replicas behind one port, with untied heads; they end with one killed engine."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from learner.operate.server_process import free_ports
from tests.contract.running_server import (
    RunningServer,
    children,
    cpu_seconds,
    response_ids,
    running_server,
    text_request,
    wait_until_gone,
)
from tests.contract.test_fresh_engine import answers
from tests.contract.toy_checkpoints import make_checkpoint, read_weights
from tests.contract.weight_sender import push, weight_group


@pytest.fixture(scope="module")
def replicas(
    checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    untied = make_checkpoint(checkpoints / "untied", seed=3, tie=False)
    folder = tmp_path_factory.mktemp("replicas") / "server"
    with running_server(untied, folder, "--replicas", "2") as replicas:
        yield replicas


@pytest.mark.req("SRV-01", "WIRE-06")
def test_the_load_is_spread_and_order_and_seeds_stay(replicas: RunningServer) -> None:
    assert replicas.http.get("/get_world_size/").json() == {"world_size": 2}
    assert len(replicas.http.get("/health/").json()["replicas"]) == 2
    engines = [pid for name, pid in replicas.processes().items() if "engine" in name]
    before = [cpu_seconds(pid) for pid in engines]
    together = replicas.infer([text_request()] * 16, temperature=1.0, seed=20, max_tokens=64)
    used = [cpu_seconds(pid) - b for pid, b in zip(engines, before, strict=True)]
    assert min(used) > 0.3 * max(used)
    for i in (0, 1, 7, 15):
        (alone,) = replicas.infer([text_request()], temperature=1.0, seed=20 + i, max_tokens=64)
        assert response_ids(alone) == response_ids(together[i])


@pytest.mark.req("SYNC-02", "SYNC-03")
def test_untied_head_pushed_to_both_equals_loaded(
    replicas: RunningServer, checkpoints: Path, tmp_path: Path
) -> None:
    other = make_checkpoint(checkpoints / "other_untied", seed=4, tie=False)
    before = answers(replicas)
    (port,) = free_ports(1)
    with weight_group(replicas.http, port, world_size=3) as sender:
        push(replicas.http, sender, read_weights(other), 1)
    pushed = [answers(replicas) for _ in range(3)]
    with running_server(other, tmp_path / "server") as fresh:
        assert pushed == [answers(fresh)] * 3
        _stop_while_it_answers(fresh)
    assert pushed[0] != before


def _stop_while_it_answers(server: RunningServer) -> None:
    """SIGTERM ends everything within the grace period (SRV-05)."""
    everything = [server.process.pid, *children(server.process.pid)]
    with ThreadPoolExecutor() as threads:
        call = threads.submit(
            server.infer, [text_request()] * 4, temperature=1.0, seed=1, max_tokens=200
        )
        time.sleep(0.2)
        os.kill(server.process.pid, signal.SIGTERM)
        assert len(call.result(timeout=30)) == 4
    server.process.stop()
    assert wait_until_gone(everything, timeout_s=20) == []


@pytest.mark.req("SRV-05")
def test_a_killed_engine_is_named_and_its_calls_are_answered(replicas: RunningServer) -> None:
    engine = replicas.processes()["engine 1"]
    with ThreadPoolExecutor() as threads:
        running = threads.submit(
            replicas.post_infer, [text_request()] * 16, temperature=1.0, max_tokens=480
        )
        time.sleep(0.3)
        os.kill(engine, signal.SIGKILL)
        answer = running.result(timeout=5)
    assert answer.status_code == 503
    assert answer.json()["where"].startswith("replicas[")
    health = replicas.http.get("/health/")
    assert health.status_code == 503
    assert health.json()["where"] == answer.json()["where"]
    assert replicas.http.get("/live/").status_code == 200
    assert replicas.post_infer([text_request()]).status_code == 503
