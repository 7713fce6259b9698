"""A `ServerPool` over scripted servers, with a clock that its pauses advance."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from learner.data.jsonl import build_request
from learner.rollout.backend import Journal
from learner.rollout.client import RolloutClient
from learner.rollout.clock import Clock
from learner.rollout.server_pool import ServerPool
from learner.rollout.sync.probe import ProofOfEffect
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import ContractError
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from shared_contracts.server_info import Info
from tests.unit.scripted_server import ScriptedPusher, ScriptedRollouts, scripted_server

SEED = 1000
S = ScriptedRollouts


@dataclass
class PausedClock(Clock):
    """Seconds that pass in `sleep` alone, which returns at once. pauses: all of them."""

    now: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@dataclass
class Fleet:
    """A connected backend over scripted servers."""

    rollouts: list[ScriptedRollouts]
    pushers: list[ScriptedPusher]
    journal: Journal
    clock: PausedClock
    backend: ServerPool

    def ask(self, count: int, version: int | None = 1) -> list[RolloutOutput]:
        """Roll out, and compare every output with its request."""
        outputs = self.backend.rollout(requests(count), RequestConfig(seed=SEED, max_tokens=4))
        assert [output.response_token_ids for output in outputs] == [[i] for i in range(count)]
        assert [output.seed for output in outputs] == [SEED + i for i in range(count)]
        if version is not None:
            assert {output.weights_version for output in outputs} <= {(version, version)}
        return outputs

    def notes(self) -> tuple[list[tuple[str, str]], dict[str, float]]:
        """The servers that were lost since the last call, and the metrics."""
        record, payload = self.journal.take()
        return record["lost"], payload.metrics()

    def pushed(self) -> list[list[int]]:
        return [pusher.pushed for pusher in self.pushers]


def requests(count: int) -> list[RolloutInferRequest]:
    samples = [Sample(str(i), (), 64, 64, ()) for i in range(count)]
    return [build_request(sample, "Detect.", None) for sample in samples]


def differences(url: str, info: Info) -> list[ContractError]:
    """A server without its guard is another server."""
    if info.repeat_terminate.active:
        return []
    return [ContractError(f"{url} repeat_terminate", "the guard is off", "Start it with it")]


@contextmanager
def fleet(
    servers: int, decode_batch_size: int = 100, world_sizes: Sequence[int] | None = None
) -> Iterator[Fleet]:
    """A backend over new servers, connected, with weights 1 pushed."""
    with ExitStack() as stack:
        sizes = world_sizes or [1] * servers
        running = [S(stack.enter_context(scripted_server()), size) for size in sizes]
        yield stack.enter_context(fleet_of(running, decode_batch_size))


@contextmanager
def fleet_of(
    rollouts: list[ScriptedRollouts], decode_batch_size: int, proof: ProofOfEffect | None = None
) -> Iterator[Fleet]:
    pushers = [ScriptedPusher(one) for one in rollouts]
    clients = [RolloutClient(one.server.base_url, timeout_s=60.0) for one in rollouts]
    journal, clock = Journal(), PausedClock()
    backend = ServerPool(
        clients,
        pushers,
        decode_batch_size,
        journal,
        differences,
        proof=proof,
        clock=clock,
    )
    backend.connect()
    backend.push_weights(1)
    journal.take()
    try:
        yield Fleet(rollouts, pushers, journal, clock, backend)
    finally:
        backend.close()


def wait_until(holds: Callable[[], object]) -> None:
    """Look again and again. The limit of about a minute matters in a test that fails."""
    never = threading.Event()
    for _ in range(3000):
        if holds():
            return
        never.wait(0.02)
    raise AssertionError("it never happened")
