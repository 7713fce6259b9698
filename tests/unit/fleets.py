"""A `ServerBackend` over scripted servers that fail as they are told."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from learner.data.jsonl import build_request
from learner.rollout.backend import Journal
from learner.rollout.client import RolloutClient
from learner.rollout.server import ServerBackend
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import ContractError
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from shared_contracts.server_info import Info
from tests.unit.scripted_rollouts import ScriptedChannel, ScriptedRollouts
from tests.unit.scripted_server import scripted_server

SEED = 1000
S = ScriptedRollouts


@dataclass
class Fleet:
    """A backend over scripted servers; `pauses` are those it would have made."""

    rollouts: list[ScriptedRollouts]
    channels: list[ScriptedChannel]
    journal: Journal
    pauses: list[float]
    backend: ServerBackend

    def ask(self, count: int, version: int | None = 1) -> list[RolloutOutput]:
        """Roll out and hold every output against its request."""
        outputs = self.backend.rollout(requests(count), RequestConfig(seed=SEED, max_tokens=4))
        assert [output.response_token_ids for output in outputs] == [[i] for i in range(count)]
        assert [output.seed for output in outputs] == [SEED + i for i in range(count)]
        if version is not None:
            assert {output.weights_version for output in outputs} <= {(version, version)}
        return outputs

    def notes(self) -> tuple[list[tuple[str, str]], dict[str, float]]:
        """Who was lost since the last notes, by server number; and the metrics."""
        record, payload = self.journal.take()
        return record["lost"], payload.metrics()

    def pushed(self) -> list[list[int]]:
        return [channel.pushed for channel in self.channels]


def requests(count: int) -> list[RolloutInferRequest]:
    samples = [Sample(str(i), (), 64, 64, ()) for i in range(count)]
    return [build_request(sample, "Detect.", None) for sample in samples]


@contextmanager
def fleet(
    servers: int,
    decode_batch_size: int = 100,
    timeout_s: float = 20.0,
    world_sizes: Sequence[int] | None = None,
) -> Iterator[Fleet]:
    """Connected, with weights 1 pushed."""
    with ExitStack() as stack:
        sizes = world_sizes or [1] * servers
        running = [S(stack.enter_context(scripted_server()), size) for size in sizes]
        yield stack.enter_context(fleet_of(running, decode_batch_size, timeout_s))


def differences(url: str, info: Info) -> list[ContractError]:
    """A server without its guard is not the one that was there."""
    if info.repeat_terminate.active:
        return []
    return [ContractError(f"{url} repeat_terminate", "the guard is off", "Start it with it")]


@contextmanager
def fleet_of(
    rollouts: list[ScriptedRollouts], decode_batch_size: int, timeout_s: float
) -> Iterator[Fleet]:
    channels = [ScriptedChannel(one) for one in rollouts]
    clients = [RolloutClient(one.server.base_url, timeout_s) for one in rollouts]
    journal, pauses = Journal(), list[float]()
    backend = ServerBackend(
        clients, channels, decode_batch_size, journal, pauses.append, differences
    )
    backend.connect()
    backend.push_weights(1)
    journal.take()
    try:
        yield Fleet(rollouts, channels, journal, pauses, backend)
    finally:
        backend.close()
