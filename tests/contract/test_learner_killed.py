"""SIGKILL of a learner in a push, and the push of the next learner (SYNC-04)."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection

import pytest

from learner.rollout.server_process import free_ports
from learner.rollout.sync.weights import SyncMode
from shared_contracts.weights import Transport
from tests.contract.dying_pusher import WeightsWithPhase
from tests.contract.running_server import RunningServer, response_ids, text_request
from tests.contract.toy_checkpoints import read_weights
from tests.unit.fleets import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.req("SYNC-04", "SYNC-05", "SYNC-07")]

# Longer than any wait of a test: what is noticed here is not noticed by the deadline of a phase.
LONG_S = 200.0
NOTICED_S = 1.0
# Descriptors and threads that a thread pool or the allocator may add.
SLACK = 3

Process = subprocess.Popen[str]


@contextmanager
def learner(
    server: RunningServer,
    port: int,
    weights: Path,
    phase: str,
    transport: Transport = "gloo",
    **environment: str,
) -> Iterator[Process]:
    command = [sys.executable, "-m", "tests.contract.dying_pusher", server.process.base_url]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*command, str(port), str(weights), phase, str(LONG_S), transport],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline().strip() == phase, process.communicate()[1]
            yield process
        finally:
            process.kill()


def push_again(server: RunningServer, port: int, weights: Path) -> None:
    """Push as the next learner: form a group over the same port, and send full weights."""
    mode = SyncMode(WeightsWithPhase(read_weights(weights)), None, fallback_to_full=False)
    server.push_by_learner(mode, port=port)


def weights_state(server: RunningServer) -> str:
    return str(server.info()["weights_state"])


def resources(server: RunningServer) -> dict[str, int]:
    process = Path(f"/proc/{server.process.pid}")
    return {kind: len(list((process / kind).iterdir())) for kind in ("fd", "task")}


@pytest.fixture
def port(server: RunningServer, tied: Path) -> Iterator[int]:
    """Port of the group. After the test the next learner pushes, and nothing is left."""
    (port,) = free_ports(1)
    push_again(server, port, tied)
    before, answer = resources(server), response_ids(server.infer([text_request()])[0])
    yield port
    push_again(server, port, tied)
    assert server.http.get("/health/").json()["state"] == "READY"
    assert response_ids(server.infer([text_request()])[0]) == answer
    wait_until(lambda: all(resources(server)[kind] <= before[kind] + SLACK for kind in before))


def is_open(port: int) -> bool:
    try:
        create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_a_rendezvous_ends_with_its_learner(
    server: RunningServer, port: int, other_tied: Path
) -> None:
    with learner(server, port, other_tied, "rendezvous") as process:
        wait_until(lambda: is_open(port))
        process.kill()
        wait_until(lambda: not is_open(port))
    assert weights_state(server) == "READY"


def test_a_drain_ends_with_its_learner_and_nothing_has_changed(
    server: RunningServer, port: int, other_tied: Path
) -> None:
    version = server.version
    long = {"temperature": 1.0, "max_tokens": 480}
    with learner(server, port, other_tied, "start") as process, ThreadPoolExecutor() as threads:
        running = threads.submit(server.infer, [text_request()] * 16, **long)
        server.wait_for_sequences(lambda number: number > 0)
        assert process.stdin is not None
        process.stdin.close()
        wait_until(lambda: weights_state(server) == "UPDATING")
        process.kill()
        wait_until(lambda: weights_state(server) == "READY")
        assert not running.done()
        stamps = [envelope["coordexp"]["weights_version"] for envelope in running.result()]
    assert stamps == [[version, version]] * 16
    assert server.replicas()[0]["state"] == "serving"


def test_a_transfer_ends_with_its_learner_within_a_second(
    server: RunningServer, port: int, other_tied: Path
) -> None:
    """The server sees that the connection ends. The deadline of the phase is far away."""
    with learner(server, port, other_tied, "transfer") as process:
        killed = time.monotonic()
        process.kill()
        wait_until(lambda: weights_state(server) == "PUSH_NEEDED")
        assert time.monotonic() - killed < NOTICED_S


@pytest.mark.nightly  # test_pushes.py gives up a push between two calls on scripted engines
def test_a_push_whose_learner_died_between_two_calls_is_given_up_for_the_next_one(
    server: RunningServer, port: int, tied: Path, other_tied: Path
) -> None:
    with learner(server, port, other_tied, "finish") as process:
        process.kill()
    assert weights_state(server) == "UPDATING"
    push_again(server, port, tied)
