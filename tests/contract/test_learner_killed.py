"""SIGKILL and SIGSTOP of a learner in a push, and the push of the next learner."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from learner.rollout.client import RolloutClient
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import OneSource
from tests.contract.dying_pusher import Doomed, DoomedWeights
from tests.contract.running_server import (
    START_TIMEOUT_S,
    RunningServer,
    response_ids,
    running_server,
    text_request,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import BUCKET_BYTES
from tests.unit.push_worker import wait_until

pytestmark = pytest.mark.slow

PHASES = ("rendezvous", "start", "transfer", "finish")
TIMEOUT_S = 60.0
# Descriptors and threads that a thread pool or the allocator may add.
SLACK = 2


@contextmanager
def learner(
    server: RunningServer, port: int, weights: Path, phase: str
) -> Iterator["subprocess.Popen[str]"]:
    """A learner that will stop in `phase`."""
    command = [sys.executable, "-m", "tests.contract.dying_pusher"]
    arguments = [server.process.base_url, str(port), str(weights), phase]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def die_in(process: "subprocess.Popen[str]", phase: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == phase, "its error is above"
    process.kill()
    process.wait()


def push_again(server: RunningServer, port: int, weights: Path) -> None:
    """As the next learner: a group over the same port, and a full push."""
    source = OneSource(DoomedWeights(read_weights(weights), Doomed("no phase")))
    with RolloutClient(server.process.base_url, TIMEOUT_S) as client:
        pusher = WeightPusher(client, port, source, "gloo", BUCKET_BYTES, "full")
        pusher.push(client.info().weights_version + 1)
        pusher.close()


def resources(server: RunningServer) -> dict[str, int]:
    """Descriptors and threads of the server and of its engine, without a group."""
    assert server.http.post("/close_communicator/", json={"attempt": None}).status_code == 200
    return {
        f"{kind} of {name}": len(list(Path(f"/proc/{pid}/{kind}").iterdir()))
        for name, pid in server.processes().items()
        for kind in ("fd", "task")
    }


def assert_not_grown(server: RunningServer, before: dict[str, int]) -> None:
    """Cut connections are noticed some time later."""

    def settled() -> bool:
        now = resources(server)
        return all(now[name] <= before[name] + SLACK for name in now)

    wait_until(settled)


@pytest.mark.req("SYNC-04", "SYNC-05", "SYNC-07")
def test_a_learner_killed_in_any_phase_leaves_a_server_for_the_next_one(
    server: RunningServer, tied: Path, other_tied: Path
) -> None:
    (port,) = free_ports(1)
    answer = response_ids(server.infer([text_request()])[0])
    push_again(server, port, tied)
    before = resources(server)
    for phase in PHASES:
        with learner(server, port, other_tied, phase) as process:
            die_in(process, phase)
        push_again(server, port, tied)
        assert server.http.get("/health/").json()["state"] == "READY"
        assert response_ids(server.infer([text_request()])[0]) == answer, phase
    assert_not_grown(server, before)


def wait_until_poisoned(server: RunningServer, replica_lost: bool) -> None:
    """Before the deadline of the push itself, which is TIMEOUT_S of `dying_pusher`."""

    def poisoned() -> bool:
        info = server.http.get("/info/").json()
        lost = info["replicas"][0]["restarts"] > 0
        return bool(info["weights_state"] == "POISONED" and lost >= replica_lost)

    wait_until(poisoned, START_TIMEOUT_S)


@pytest.mark.req("SYNC-04", "SYNC-05", "SYNC-07")
def test_a_learner_that_is_suspended_in_a_transfer_is_given_up(
    tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    """SIGSTOP: its connections stay. The worker that waits for its bytes is built again."""
    (port,) = free_ports(1)
    with running_server(tied, tmp_path) as server:
        answer = response_ids(server.infer([text_request()])[0])
        with learner(server, port, other_tied, "transfer") as process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "transfer", "its error is above"
            call = server.http.get("/health/").json()["weight_call"]
            assert call["route"] == "/update_weights/"
            assert call["attempt"]
            process.send_signal(signal.SIGSTOP)
            wait_until_poisoned(server, replica_lost=True)
            push_again(server, port, tied)
            assert server.http.get("/health/").json()["weight_call"] is None
            assert response_ids(server.infer([text_request()])[0]) == answer
