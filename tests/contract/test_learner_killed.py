"""SIGKILL of a learner in every phase of its push, and what the next one finds."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from learner.rollout.client import RolloutClient
from learner.rollout.exclusive_lease import require_exclusive_lease
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import OneSource
from shared_contracts.errors import ContractError
from tests.contract.dying_pusher import Doomed, DoomedWeights
from tests.contract.running_server import (
    RunningServer,
    response_ids,
    running_server,
    text_request,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import BUCKET_BYTES

pytestmark = pytest.mark.slow

PHASES = ("rendezvous", "start", "transfer", "finish")
TIMEOUT_S = 60.0
# What a thread pool or the allocator may add.
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
    """What the next learner does: a group over the same port, and a full push."""
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


def grown(server: RunningServer, before: dict[str, int]) -> dict[str, int]:
    """What there is more of, once connections that were cut have been noticed."""
    deadline = time.monotonic() + 20
    while True:
        now = resources(server)
        more = {name: now[name] - before[name] for name in now if now[name] > before[name] + SLACK}
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.2)


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
    assert grown(server, before) == {}


@pytest.mark.req("SYNC-07")
def test_a_learner_in_the_middle_of_a_push_is_left_alone_until_it_is_killed(
    server: RunningServer, tied: Path, other_tied: Path
) -> None:
    """A newcomer looks as `learner train` and `learner eval` do."""
    (port,) = free_ports(1)
    with RolloutClient(server.process.base_url, TIMEOUT_S) as client:
        with learner(server, port, other_tied, "start") as process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "start", "its error is above"
            with pytest.raises(ContractError, match="another learner pushes"):
                require_exclusive_lease([client])
        require_exclusive_lease([client])
        assert client.info().weight_group is not None, "it has left its group behind"
    push_again(server, port, tied)


def wait_until_poisoned(server: RunningServer, replica_lost: bool) -> None:
    """The learner named no time-out below TIMEOUT_S of `dying_pusher`, which is longer."""
    deadline = time.monotonic() + 90
    while True:
        info = server.http.get("/info/").json()
        (replica,) = info["replicas"]
        lost = replica["restarts"] > 0
        if info["weights_state"] == "POISONED" and lost >= replica_lost:
            return
        assert time.monotonic() < deadline, info
        time.sleep(0.2)


@pytest.mark.req("SYNC-04", "SYNC-05", "SYNC-07")
def test_a_learner_that_stands_still_in_a_push_is_given_up(
    tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    """SIGSTOP: its connections stay. A worker that waits for its bytes is lost and built again."""
    (port,) = free_ports(1)
    with running_server(tied, tmp_path) as server:
        answer = response_ids(server.infer([text_request()])[0])
        for phase in ("start", "transfer"):
            with learner(server, port, other_tied, phase) as process:
                assert process.stdout is not None
                assert process.stdout.readline().strip() == phase, "its error is above"
                call = server.http.get("/health/").json()["weight_call"]
                assert call["route"] == {"start": None, "transfer": "/update_weights/"}[phase]
                assert call["attempt"]
                process.send_signal(signal.SIGSTOP)
                wait_until_poisoned(server, replica_lost=phase == "transfer")
                push_again(server, port, tied)
                assert server.http.get("/health/").json()["weight_call"] is None
                assert response_ids(server.infer([text_request()])[0]) == answer, phase
