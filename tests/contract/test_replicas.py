"""Two replicas behind one port, with untied heads: load, pushes, deaths and hangs."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

import httpx
import pytest

from learner.rollout.client import RolloutClient
from learner.rollout.server_process import free_ports
from tests.contract.running_server import (
    START_TIMEOUT_S,
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

pytestmark = pytest.mark.slow

HANG_S = 15.0


@pytest.fixture(scope="module")
def replicas(
    checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    untied = make_checkpoint(checkpoints / "untied", seed=3, tie=False)
    folder = tmp_path_factory.mktemp("replicas") / "server"
    options = ("--replicas", "2", "--hang-seconds", str(HANG_S), "--grace-seconds", "1")
    with running_server(untied, folder, *options) as replicas:
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
        assert len(call.result(timeout=120)) == 4
    server.process.stop()
    assert wait_until_gone(everything, timeout_s=60) == []


@pytest.mark.req("SRV-05", "SYNC-07")
def test_a_killed_engine_is_named_built_again_and_serves_after_a_push(
    replicas: RunningServer, checkpoints: Path
) -> None:
    _push_both(replicas, checkpoints)
    before = replicas.http.get("/info/").json()
    answer = _call_while(replicas, partial(_kill, replicas, "engine"))
    assert answer.status_code == 503
    lost = answer.json()["where"]
    assert lost in ("replicas[0]", "replicas[1]")
    health = replicas.http.get("/health/")
    assert (health.status_code, health.json()["where"]) == (503, lost)
    assert replicas.http.get("/live/").status_code == 200
    _others_answer(replicas, before["weights_version"])
    assert replicas.http.get("/info/").json()["server_epoch"] != before["server_epoch"]

    _wait_for_states(replicas, {"serving", "needs-push"})
    health = replicas.http.get("/health/")
    assert (health.status_code, health.json()["where"]) == (503, lost)
    assert "needs-push" in health.json()["detail"]
    assert health.json()["type"] == "urn:rollmatch:push-needed"
    with RolloutClient(replicas.process.base_url, timeout_s=60) as client:
        client.wait_until_pushable()
    _others_answer(replicas, before["weights_version"])
    _push_both(replicas, checkpoints)
    assert replicas.http.get("/health/").status_code == 200
    together = replicas.infer([text_request()] * 8)
    assert len({tuple(response_ids(envelope)) for envelope in together}) == 1


@pytest.mark.req("SRV-05")
def test_a_hung_engine_is_noticed_by_its_silence_and_built_again(
    replicas: RunningServer, checkpoints: Path
) -> None:
    def hang() -> None:
        os.kill(replicas.processes()["engine 0"], signal.SIGSTOP)

    answer = _call_while(replicas, hang, timeout_s=HANG_S + 20)
    assert answer.status_code == 503
    assert replicas.http.get("/live/").status_code == 200
    problem = replicas.http.get("/health/").json()
    assert problem["where"] == answer.json()["where"]
    _wait_for_states(replicas, {"serving", "needs-push"})
    _push_both(replicas, checkpoints)
    assert replicas.http.get("/health/").status_code == 200


@pytest.mark.req("SRV-05")
@pytest.mark.parametrize("stopped", ["the server", "the server and its engines"])
def test_a_server_that_is_stopped_and_continued_loses_no_replica(
    replicas: RunningServer, stopped: str
) -> None:
    """SIGSTOP for longer than the silence of a lost engine, in the middle of a call."""
    engines = children(replicas.process.pid) if stopped.endswith("engines") else []

    def stand_still() -> None:
        with ExitStack() as continued:
            for pid in (replicas.process.pid, *engines):
                os.kill(pid, signal.SIGSTOP)
                continued.callback(os.kill, pid, signal.SIGCONT)
            time.sleep(HANG_S + 2)

    before, greedy = replicas.http.get("/info/").json(), answers(replicas)
    answer = _call_while(replicas, stand_still, timeout_s=120)
    assert answer.status_code == 200, answer.text
    assert replicas.http.get("/live/").json()["server_epoch"] == before["server_epoch"]
    assert replicas.http.get("/health/").status_code == 200
    after = replicas.http.get("/info/").json()["replicas"]
    assert [r["restarts"] for r in after] == [r["restarts"] for r in before["replicas"]]
    assert answers(replicas) == greedy


@pytest.mark.req("SRV-05", "DIST-05")
def test_whatever_child_is_killed_under_load_every_call_is_answered(
    replicas: RunningServer, checkpoints: Path
) -> None:
    random = Random(7)
    for victim, status, timeout_s in (("resource tracker", 200, 120), ("engine", 503, 5)):
        kill = partial(_kill, replicas, victim)
        answer = _call_while(replicas, kill, random.uniform(0.0, 0.5), timeout_s)
        assert answer.status_code == status
        _others_answer(replicas)
        if victim == "engine":
            _wait_for_states(replicas, {"serving", "needs-push"})
            _push_both(replicas, checkpoints)
        assert replicas.http.get("/health/").status_code == 200


@pytest.mark.req("SRV-05")
def test_a_call_that_outlives_the_grace_period_is_answered_and_nothing_is_left(
    replicas: RunningServer,
) -> None:
    """The last test: it stops the server."""
    everything = [replicas.process.pid, *children(replicas.process.pid)]
    many = [text_request()] * 1024
    with ThreadPoolExecutor() as threads:
        running = threads.submit(replicas.post_infer, many, temperature=1.0, max_tokens=480)
        _wait_until_both_decode(replicas)
        os.kill(replicas.process.pid, signal.SIGTERM)
        answer = running.result(timeout=120)
    assert answer.status_code == 503
    assert answer.json()["detail"] == "the server is stopping"
    assert wait_until_gone(everything, timeout_s=60) == []


def _call_while(
    server: RunningServer, happens: Callable[[], None], delay_s: float = 0.0, timeout_s: float = 5
) -> httpx.Response:
    """The answer of a long call over both replicas, in which `happens` falls.

    delay_s: from when both decode; timeout_s: within which the answer must come after that.
    """
    with ThreadPoolExecutor() as threads:
        running = threads.submit(
            server.post_infer, [text_request()] * 64, temperature=1.0, max_tokens=480
        )
        _wait_until_both_decode(server)
        time.sleep(delay_s)
        happens()
        return running.result(timeout=timeout_s)


def _wait_until_both_decode(server: RunningServer) -> None:
    assert len(server.running_sequences()) == 2
    server.wait_for_sequences(lambda running: running > 0)


def _kill(server: RunningServer, kind: str) -> None:
    of_that_kind = {
        "engine": [pid for name, pid in server.processes().items() if "engine" in name],
        "resource tracker": [
            pid
            for pid in children(server.process.pid)
            if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ],
    }
    os.kill(of_that_kind[kind][-1], signal.SIGKILL)


def _others_answer(server: RunningServer, version: int | None = None) -> None:
    for envelope in server.infer([text_request()] * 4):
        if version is not None:
            assert envelope["coordexp"]["weights_version"] == [version, version]


def _wait_for_states(server: RunningServer, states: set[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if {r["state"] for r in server.http.get("/info/").json()["replicas"]} == states:
            return
        time.sleep(0.2)
    raise AssertionError(server.http.get("/info/").json()["replicas"])


def _push_both(server: RunningServer, checkpoints: Path) -> None:
    (port,) = free_ports(1)
    version = server.http.get("/info/").json()["weights_version"] + 1
    with weight_group(server.http, port, world_size=3) as sender:
        push(server.http, sender, read_weights(checkpoints / "untied"), version)
