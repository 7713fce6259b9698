"""A `ServerPool` over scripted servers, with a clock that its pauses advance."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from learner.data.jsonl import build_request
from learner.rollout.backend import Journal
from learner.rollout.client import Clock, RolloutClient
from learner.rollout.server_pool import ServerPool
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


@dataclass(kw_only=True)
class Fleet:
    """One learner process with its backend over scripted servers.

    first: the number of its first request; answers have the numbers of their requests.
    """

    rollouts: list[ScriptedRollouts]
    pushers: list[ScriptedPusher]
    journal: Journal
    backend: ServerPool
    clock: PausedClock = field(default_factory=PausedClock)
    first: int = 0

    def ask(self, count: int, version: int | None = 1, how: str = "rollout") -> list[RolloutOutput]:
        """Roll out by the method `how`, and compare every output with its request."""
        numbers = range(self.first, self.first + count)
        config = RequestConfig(seed=SEED + self.first, max_tokens=4)
        outputs: list[Any] = list(getattr(self.backend, how)(requests(numbers), config))
        if how == "stream":
            outputs = list(chain.from_iterable(outputs))
        assert [output.response_token_ids for output in outputs] == [[n] for n in numbers]
        assert [output.seed for output in outputs] == [SEED + n for n in numbers]
        if version is not None:
            assert {output.weights_version for output in outputs} <= {(version, version)}
        return outputs

    def notes(self) -> tuple[list[tuple[str, str]], dict[str, float]]:
        """The servers that were lost since the last call, and the metrics."""
        record, payload = self.journal.take()
        return record["lost"], payload.metrics()

    def pushed(self) -> list[list[int]]:
        return [pusher.pushed for pusher in self.pushers]


def requests(numbers: Iterable[int]) -> list[RolloutInferRequest]:
    samples = [Sample(str(number), (), 64, 64, ()) for number in numbers]
    return [build_request(sample, "Detect.", None) for sample in samples]


def differences(url: str, info: Info) -> list[ContractError]:
    """A server without its guard is another server."""
    if info.repeat_terminate.active:
        return []
    return [ContractError(f"{url} repeat_terminate", "the guard is off", "Start it with it")]


@contextmanager
def scripted_rollouts(sizes: Sequence[int]) -> Iterator[list[ScriptedRollouts]]:
    """Running servers, of these world sizes."""
    with ExitStack() as stack:
        yield [S(stack.enter_context(scripted_server()), size) for size in sizes]


@contextmanager
def fleet(
    servers: int, decode_batch_size: int = 100, world_sizes: Sequence[int] | None = None
) -> Iterator[Fleet]:
    """A backend over new servers, connected, with weights 1 pushed."""
    with (
        scripted_rollouts(world_sizes or [1] * servers) as running,
        fleet_of(running, decode_batch_size) as run,
    ):
        yield run


@contextmanager
def fleet_of(
    rollouts: list[ScriptedRollouts], decode_batch_size: int, **options: Any
) -> Iterator[Fleet]:
    """options: of the backend."""
    pushers = [ScriptedPusher(one) for one in rollouts]
    clients = [RolloutClient(one.server.base_url, timeout_s=60.0) for one in rollouts]
    journal, clock = Journal(), PausedClock()
    backend = ServerPool(
        clients, pushers, decode_batch_size, journal, differences, clock=clock, **options
    )
    backend.connect()
    backend.push_weights(1)
    journal.take()
    try:
        yield Fleet(
            rollouts=rollouts, pushers=pushers, journal=journal, backend=backend, clock=clock
        )
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
