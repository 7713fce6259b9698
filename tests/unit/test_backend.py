"""Rollouts over two servers, and the policy that never asks stale weights."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from learner.data.jsonl import build_request
from learner.rollout.backend import WeightsVersion
from learner.rollout.client import RolloutClient
from learner.rollout.policy import Asking, OpenBackend, Policy
from learner.rollout.server import ServerBackend
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import ProblemError, RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from shared_contracts.server_info import WorldSize
from shared_contracts.weights import CommunicatorReady, SyncReport
from tests.unit.scripted_rollouts import ScriptedChannel, ScriptedRollouts
from tests.unit.scripted_server import (
    Route,
    ScriptedServer,
    envelope,
    problem,
    scripted_server,
)

ROUTE = "POST /infer/"


def echo(body: Any) -> list[Any]:
    """Answers with the request's number as its token, and with its seed as the server counts."""
    seed, n = body["request_config"].get("seed"), body["request_config"].get("n", 1)
    return [
        envelope([int(request["uuid"])], [1, 2], None if seed is None else seed + i, n=n)
        for i, request in enumerate(body["infer_requests"])
    ]


def says(answer: WorldSize) -> Route:
    return lambda _: answer


class NoPushes:
    """The channel of a server that nobody pushes to."""

    def connect(self) -> CommunicatorReady:
        raise AssertionError("nobody connects")

    def push(self, version: int) -> SyncReport:
        raise AssertionError("nobody pushes")

    def abandon(self) -> None:
        raise AssertionError("no server is lost")

    def close(self) -> None: ...


@contextmanager
def backend_over(
    world_sizes: Sequence[int], decode_batch_size: int = 100
) -> Iterator[tuple[ServerBackend, list[ScriptedServer]]]:
    """A backend over as many scripted servers, without pushing anything."""
    with ExitStack() as stack:
        servers, clients, channels = [], [], []
        for size in world_sizes:
            server = stack.enter_context(scripted_server())
            server.routes["GET /get_world_size/"] = says(WorldSize(world_size=size))
            server.routes[ROUTE] = echo
            client = RolloutClient(server.base_url, timeout_s=20.0)
            channels.append(NoPushes())
            servers.append(server)
            clients.append(client)
        backend = ServerBackend(clients, channels, decode_batch_size)
        stack.callback(backend.close)
        yield backend, servers


def requests(count: int) -> list[RolloutInferRequest]:
    samples = [Sample(str(i), (), 64, 64, ()) for i in range(count)]
    return [build_request(sample, "Detect.", None) for sample in samples]


def asked(server: ScriptedServer) -> list[list[int]]:
    """Numbers of the requests of each call."""
    return [[int(r["uuid"]) for r in body["infer_requests"]] for body in server.bodies(ROUTE)]


def tokens(outputs: list[RolloutOutput]) -> list[int]:
    return [output.response_token_ids[0] for output in outputs]


@pytest.mark.req("DIST-01")
def test_no_requests_send_nothing() -> None:
    with backend_over([1, 1]) as (backend, servers):
        assert backend.rollout([], RequestConfig(seed=1)) == []
        assert [asked(server) for server in servers] == [[], []]


@pytest.mark.req("DIST-01", "DIST-02")
def test_servers_get_contiguous_chunks_and_answers_keep_the_order() -> None:
    with backend_over([1, 1]) as (backend, servers):
        outputs = backend.rollout(requests(5), RequestConfig(seed=1))
        assert tokens(outputs) == [0, 1, 2, 3, 4]
        assert [asked(server) for server in servers] == [[[0, 1, 2]], [[3, 4]]]


@pytest.mark.req("DIST-02")
def test_an_empty_chunk_sends_nothing() -> None:
    with backend_over([1, 1]) as (backend, servers):
        assert tokens(backend.rollout(requests(1), RequestConfig())) == [0]
        assert [asked(server) for server in servers] == [[[0]], []]


@pytest.mark.req("DIST-03")
def test_a_larger_server_gets_the_larger_share() -> None:
    with backend_over([1, 3]) as (backend, servers):
        assert tokens(backend.rollout(requests(8), RequestConfig())) == list(range(8))
        assert [asked(server) for server in servers] == [[[0, 1]], [[2, 3, 4, 5, 6, 7]]]


@pytest.mark.req("DIST-03")
def test_a_server_works_through_its_chunk_in_calls_of_a_part_of_its_places() -> None:
    with backend_over([1, 1], decode_batch_size=2) as (backend, servers):
        assert tokens(backend.rollout(requests(9), RequestConfig(seed=1))) == list(range(9))
        calls = [sorted(asked(server)) for server in servers]
    assert calls == [[[0], [1], [2], [3], [4]], [[5], [6], [7], [8]]]


@pytest.mark.req("CFG-05", "DIST-03", "ROLL-01")
def test_microbatching_increases_decode_parallelism_without_changing_outputs_format() -> None:
    answers = {}
    for decode_batch_size, calls in ((1, [[0], [1], [2], [3]]), (4, [[0, 1, 2, 3]])):
        with backend_over([1], decode_batch_size) as (backend, (server,)):
            answers[decode_batch_size] = backend.rollout(requests(4), RequestConfig(seed=7))
            assert asked(server) == calls
    assert answers[1] == answers[4]
    assert tokens(answers[4]) == [0, 1, 2, 3]


@pytest.mark.req("DIST-03")
@pytest.mark.parametrize(("n", "calls"), [(1, [[0, 1, 2]]), (2, [[0], [1], [2]])])
def test_a_call_counts_every_sequence_of_a_request(n: int, calls: list[list[int]]) -> None:
    with backend_over([2], decode_batch_size=2) as (backend, servers):
        backend.rollout(requests(3), RequestConfig(n=n))
        assert sorted(asked(servers[0])) == calls


@pytest.mark.req("SEED-01")
@pytest.mark.parametrize("world_sizes", [[1], [1, 1], [1, 2]])
@pytest.mark.parametrize("decode_batch_size", [2, 100])
def test_a_requests_seed_does_not_depend_on_the_servers(
    world_sizes: list[int], decode_batch_size: int
) -> None:
    with backend_over(world_sizes, decode_batch_size) as (backend, _):
        outputs = backend.rollout(requests(7), RequestConfig(seed=1000))
    assert [output.seed for output in outputs] == [1000 + i for i in range(7)]


def test_without_a_seed_none_is_sent() -> None:
    with backend_over([1, 1]) as (backend, servers):
        backend.rollout(requests(2), RequestConfig())
        assert all("seed" not in s.bodies(ROUTE)[0]["request_config"] for s in servers)


@pytest.mark.req("DIST-04")
def test_world_sizes_are_asked_once() -> None:
    with backend_over([1, 1]) as (backend, servers):
        backend.rollout(requests(3), RequestConfig())
        backend.rollout(requests(3), RequestConfig())
        assert [len(server.bodies("GET /get_world_size/")) for server in servers] == [1, 1]


@pytest.mark.req("ROLL-01")
def test_an_output_carries_what_the_envelope_says() -> None:
    def answer(_: object) -> list[Any]:
        made = envelope([5, 6], [1, 2, 3], seed=9, text="{}")
        stamp = made.coordexp.model_copy(
            update={
                "repeat_terminate_triggered": 1,
                "repeat_terminated_choices": [0],
                "weights_version": (3, 4),
            }
        )
        return [made.model_copy(update={"coordexp": stamp})]

    with backend_over([1]) as (backend, servers):
        servers[0].routes[ROUTE] = answer
        (output,) = backend.rollout(requests(1), RequestConfig(seed=9))
    assert output == RolloutOutput(
        prompt_token_ids=[1, 2, 3],
        response_token_ids=[5, 6],
        text="{}",
        finish_reason="stop",
        repeat_terminated=True,
        weights_version=(3, 4),
        seed=9,
    )


@pytest.mark.req("REP-05")
@pytest.mark.parametrize(
    ("ended", "used"), [([], False), ([1], False), ([0], True), ([0, 2], True)]
)
def test_an_output_was_ended_by_the_guard_when_its_own_choice_was(
    ended: list[int], used: bool
) -> None:
    def answer(_: object) -> list[Any]:
        made = envelope([5], [1], n=3)
        stamp = made.coordexp.model_copy(
            update={
                "repeat_terminate_triggered": int(bool(ended)),
                "repeat_terminated_choices": ended,
            }
        )
        return [made.model_copy(update={"coordexp": stamp})]

    with backend_over([1]) as (backend, servers):
        servers[0].routes[ROUTE] = answer
        (output,) = backend.rollout(requests(1), RequestConfig(n=3))
    assert output.repeat_terminated is used


@pytest.mark.req("DIST-05")
def test_every_call_has_an_id_of_its_own() -> None:
    with backend_over([1, 1], decode_batch_size=1) as (backend, servers):
        backend.rollout(requests(4), RequestConfig())
        backend.rollout(requests(2), RequestConfig())
        ids = [body["request_id"] for server in servers for body in server.bodies(ROUTE)]
    assert len(ids) == 6
    assert len(set(ids)) == 6


@pytest.mark.req("WIRE-03", "SYNC-09")
def test_a_call_expects_the_weights_that_were_pushed_last() -> None:
    with scripted_server() as server:
        channel = ScriptedChannel(ScriptedRollouts(server))
        client = RolloutClient(server.base_url)
        backend = ServerBackend([client], [channel], 4, sleep=lambda _: None)
        backend.rollout(requests(1), RequestConfig())
        assert backend.connect() == 0
        for version in (7, 8):
            backend.push_weights(version)
            backend.rollout(requests(1), RequestConfig())
        channel.failures.extend([RunError("the push broke")] * 2)
        with pytest.raises(RunError, match="the push broke"):
            backend.push_weights(9)
        backend.rollout(requests(1), RequestConfig())
        backend.close()
        expected = [body.get("expected_weights_version") for body in server.bodies(ROUTE)]
    assert expected == [None, 7, 8, 8]
    assert channel.closed


@pytest.mark.req("WIRE-05")
def test_a_refusal_of_one_server_is_raised() -> None:
    with backend_over([1, 1]) as (backend, servers):
        servers[1].routes[ROUTE] = lambda _: problem("invalid-request", "too long", "messages")
        with pytest.raises(ProblemError, match="too long"):
            backend.rollout(requests(2), RequestConfig())


def test_closing_twice_is_no_error() -> None:
    with backend_over([1]) as (backend, _):
        backend.close()


class Recorder:
    """A backend that notes what it was asked; pushes fail while `broken`."""

    def __init__(self) -> None:
        self.pushed: list[int] = []
        self.seeds: list[int | None] = []
        self.requests: list[RolloutInferRequest] = []
        self.broken = False

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        self.requests += requests
        self.seeds.append(request_config.seed)
        return []

    def push_weights(self, version: int) -> None:
        if self.broken:
            raise RuntimeError("the push broke")
        self.pushed.append(version)

    def close(self) -> None:
        self.pushed.append(-1)


def policy_of(backend: Recorder, version: int = 0) -> Policy:
    asking = Asking("Detect.", "Be exact.", RequestConfig(max_tokens=5))
    return Policy(OpenBackend(backend, WeightsVersion(version)), asking)


@pytest.mark.req("SYNC-07", "SYNC-09")
def test_weights_are_pushed_only_when_they_have_changed() -> None:
    backend = Recorder()
    policy = policy_of(backend, version=6)
    policy.push_if_stale()
    policy.push_if_stale()
    assert (backend.pushed, policy.version) == ([7], 7)
    policy.mark_updated()
    policy.mark_updated()
    policy.push_if_stale()
    assert (backend.pushed, policy.version) == ([7, 8], 8)


@pytest.mark.req("SYNC-09")
def test_asking_before_the_push_is_a_defect() -> None:
    policy = policy_of(Recorder())
    with pytest.raises(AssertionError, match="push_if_stale"):
        policy.answer([], seed=1)
    policy.push_if_stale()
    policy.answer([], seed=1)
    policy.mark_updated()
    with pytest.raises(AssertionError, match="push_if_stale"):
        policy.answer([], seed=1)


@pytest.mark.req("SYNC-07", "SYNC-09")
def test_a_broken_push_leaves_the_policy_stale_at_its_version() -> None:
    backend = Recorder()
    policy = policy_of(backend)
    backend.broken = True
    with pytest.raises(RuntimeError, match="the push broke"):
        policy.push_if_stale()
    assert policy.version == 0
    backend.broken = False
    policy.push_if_stale()
    assert backend.pushed == [1]


def test_a_sample_is_asked_with_its_images_the_prompt_and_the_seed() -> None:
    backend = Recorder()
    policy = policy_of(backend)
    policy.push_if_stale()
    sample = Sample("a:1", (), 64, 64, ())
    policy.answer([sample], seed=42)
    assert backend.requests == [build_request(sample, "Detect.", "Be exact.")]
    assert backend.seeds == [42]
    assert [message.role for message in backend.requests[0].messages] == ["system", "user"]
