"""A server that was pushed to and a server that loaded the same checkpoint are one."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.rollout.server_process import free_ports
from tests.contract.running_server import (
    RunningServer,
    children,
    draw_scene,
    image_request,
    response_ids,
    running_server,
    text_request,
    wait_until_gone,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import push, weight_group

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fresh(other_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(other_tied, tmp_path_factory.mktemp("fresh") / "server") as fresh:
        yield fresh


@pytest.mark.req("SYNC-02", "SYNC-03", "SEED-02")
def test_tied_head_pushed_equals_loaded(
    server: RunningServer, fresh: RunningServer, tied: Path, other_tied: Path
) -> None:
    """Greedy and seeded answers, to text and to images."""
    (port,) = free_ports(1)
    with weight_group(server.http, port) as sender:
        push(server.http, sender, read_weights(other_tied), 901)
        pushed = answers(server)
        push(server.http, sender, read_weights(tied), 902)
    assert pushed == answers(fresh)
    assert pushed != answers(server)


def answers(server: RunningServer) -> list[list[int]]:
    scenes = [str(draw_scene(server.media / f"{i}.png", i)) for i in range(4)]
    requests = [text_request()] + [image_request(scene) for scene in scenes]
    greedy = server.infer(requests, max_tokens=32)
    sampled = server.infer(requests, max_tokens=32, temperature=1.0, seed=11)
    return [response_ids(envelope) for envelope in greedy + sampled]


@pytest.mark.req("SRV-05")
def test_a_killed_server_leaves_no_orphan(fresh: RunningServer) -> None:
    below = children(fresh.process.pid)
    assert len(below) >= 1
    os.kill(fresh.process.pid, signal.SIGKILL)
    assert wait_until_gone(below, timeout_s=60) == []
