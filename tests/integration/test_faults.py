"""SIGKILL of a real server and of its engine, in the middle of pushes.

A supervisor starts the server again. The interrupted push succeeds: every answer, in order, is from
its weights. test_kills.py kills a server in the middle of a rollout.
"""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from learner.data.jsonl import build_request
from learner.rollout.backend import Journal
from learner.rollout.server_pool import ServerPool
from learner.rollout.server_process import ServerProcess, SupervisedServer, free_ports
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import SyncMode
from learner.types import Sample
from shared_contracts.infer import RequestConfig
from tests.contract.dying_pusher import ClientWithPhases, WeightsWithPhase
from tests.contract.running_server import CPU, PROMPT, START_TIMEOUT_S, children, is_engine
from tests.contract.toy_checkpoints import read_weights

REQUESTS = 8
MAX_TOKENS = 64
SEED = 5
BUCKET_BYTES = 2**16

pytestmark = [pytest.mark.slow]


@dataclass
class Play:
    """A supervised server and a learner that uses it. version: of the last push.

    actions: by the phase of a push that they come before, each taken once.
    """

    server: SupervisedServer
    actions: dict[str, Callable[[], None]]
    backend: ServerPool
    version: int = 0

    def push(self) -> None:
        self.version += 1
        self.backend.push_weights(self.version)

    def ask(self) -> list[list[int]]:
        """Sampled answers, all by the weights of the last push."""
        samples = [Sample(str(number), (), 64, 64, ()) for number in range(REQUESTS)]
        requests = [build_request(s, f"{PROMPT} {s.sample_id}", None) for s in samples]
        config = RequestConfig(
            max_tokens=MAX_TOKENS, temperature=1.0, seed=SEED, return_details=True
        )
        outputs = self.backend.rollout(requests, config)
        assert [output.seed for output in outputs] == [SEED + i for i in range(REQUESTS)]
        assert {output.weights_version for output in outputs} == {(self.version, self.version)}
        return [output.response_token_ids for output in outputs]

    def kill_server(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)

    def kill_engine(self) -> None:
        (engine,) = (pid for pid in children(self.server.pid) if is_engine(pid))
        os.kill(engine, signal.SIGKILL)


@pytest.fixture(scope="module")
def play(tied: Path, other_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    folder = tmp_path_factory.mktemp("faults")
    (port,) = free_ports(1)
    options = ["--model", str(tied), *CPU, "--max-model-len", "512"]
    server = SupervisedServer(
        lambda: ServerProcess(options, folder / "server.log", port), START_TIMEOUT_S, [0.1] * 9
    )
    try:
        actions: dict[str, Callable[[], None]] = {}

        def at(phase: str) -> None:
            actions.pop(phase, lambda: None)()

        weights = WeightsWithPhase(read_weights(other_tied), at)
        mode, (group_port,) = SyncMode(weights, None, fallback_to_full=False), free_ports(1)
        client = ClientWithPhases(server.base_url, 120.0, at, live_interval_s=0.5)
        pusher = WeightPusher(client, group_port, mode, "gloo", BUCKET_BYTES)
        backend = ServerPool([client], [pusher], REQUESTS, Journal())
        backend.connect()
        yield Play(server, actions, backend)
        backend.close()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def undisturbed(play: Play) -> list[list[int]]:
    play.push()
    answers = play.ask()
    assert len({tuple(answer) for answer in answers}) == REQUESTS
    return answers


@pytest.mark.req("SYNC-04", "SYNC-05", "SYNC-07", "SYNC-09", "SRV-05")
@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        ("transfer", "server"),
        pytest.param("finish", "engine", marks=pytest.mark.nightly),
        pytest.param("finished", "server", marks=pytest.mark.nightly),
    ],
)
def test_after_a_kill_in_a_push_the_next_answers_are_of_its_weights(
    play: Play, undisturbed: list[list[int]], moment: str, victim: str
) -> None:
    """At `finished` the server has answered 200, and the push has succeeded."""
    kill = {"server": play.kill_server, "engine": play.kill_engine}[victim]
    play.actions[moment] = kill
    play.push()
    assert play.ask() == undisturbed
    assert not play.actions
