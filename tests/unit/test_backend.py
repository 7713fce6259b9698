"""Rollouts over several servers, the policy, and the journal of calls and pushes."""

import threading
from functools import partial
from typing import Any

import pytest
import torch

from learner.rollout.backend import Call, Journal, RolloutBackend
from learner.rollout.parallel_calls import in_parallel
from learner.rollout.policy import Policy, RequestSettings
from learner.types import RolloutOutput
from shared_contracts.infer import RequestConfig
from shared_contracts.rollout_config import ServerAddress
from tests.unit.fleets import fleet, requests
from tests.unit.scripted_server import INFER, envelope, report


@pytest.mark.req("DIST-01", "DIST-02", "DIST-03", "CFG-05", "ROLL-01")
@pytest.mark.scenario("Microbatching increases decode parallelism without changing outputs format")
@pytest.mark.parametrize(
    ("world_sizes", "decode_batch_size", "count", "calls"),
    [
        ([1, 1], 100, 0, [[], []]),
        ([1, 3], 100, 8, [[[0, 1]], [[2, 3, 4, 5, 6, 7]]]),
        ([1], 1, 4, [[[0], [1], [2], [3]]]),
        ([1], 4, 4, [[[0, 1, 2, 3]]]),
        ([1, 1], 2, 9, [[[0], [1], [2], [3], [4]], [[5], [6], [7], [8]]]),
    ],
)
def test_servers_get_contiguous_chunks_in_calls_of_a_part_of_their_places(
    world_sizes: list[int], decode_batch_size: int, count: int, calls: list[list[list[int]]]
) -> None:
    """calls: numbers of the requests of each call, by server."""
    with fleet(len(world_sizes), decode_batch_size, world_sizes) as run:
        run.ask(count)
    for one, of_server in zip(run.rollouts, calls, strict=True):
        sent = [body["infer_requests"] for body in one.server.bodies(INFER)]
        assert sorted([int(each["uuid"]) for each in call] for call in sent) == of_server


@pytest.mark.req("DIST-04", "DIST-05")
def test_world_size_is_asked_once_and_every_call_has_its_own_id() -> None:
    with fleet(2, decode_batch_size=1) as run:
        run.ask(4)
        run.backend.rollout(requests(range(2)), RequestConfig())
        sent = [body for one in run.rollouts for body in one.server.bodies(INFER)]
        looks = [len(one.server.bodies("GET /get_world_size/")) for one in run.rollouts]
    assert looks == [1, 1]
    assert len({body["request_id"] for body in sent}) == 6
    assert sum("seed" in body["request_config"] for body in sent) == 4


@pytest.mark.req("ROLL-01", "REP-05")
@pytest.mark.parametrize(
    ("ended", "own_choice"), [([], False), ([1], False), ([0], True), ([0, 2], True)]
)
def test_output_has_the_fields_of_its_own_choice(ended: list[int], own_choice: bool) -> None:
    with fleet(1) as run:
        made = envelope([5, 6], [1, 2, 3], seed=9, text="{}", n=3)
        made.coordexp.server_epoch = run.rollouts[0].epoch
        made.coordexp.repeat_terminated_choices = ended
        made.coordexp.repeat_terminate_triggered = 1 if ended else 0
        run.rollouts[0].server.routes[INFER] = lambda _: [made]
        (output,) = run.backend.rollout(requests(range(1)), RequestConfig(seed=9, n=3))
    assert output == RolloutOutput(
        prompt_token_ids=[1, 2, 3],
        response_token_ids=[5, 6],
        text="{}",
        finish_reason="stop",
        repeat_terminated=own_choice,
        weights_version=(1, 1),
        seed=9,
    )


# --- The policy -------------------------------------------------------------------------


class Recorder(RolloutBackend):
    """A backend that records its calls; pushes fail while it is `broken`."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[int] = []
        self.repushed: list[int] = []
        self.broken = False

    def rollout(self, requests: Any, request_config: RequestConfig) -> list[RolloutOutput]:
        return []

    def push_weights(self, version: int) -> None:
        if self.broken:
            raise RuntimeError("the push broke")
        self.pushed.append(version)

    def repush_restarted(self) -> None:
        self.repushed.append(self.version.newest)

    def close(self) -> None: ...


def recorded() -> tuple[Recorder, Policy]:
    backend = Recorder()
    return backend, Policy(backend, RequestSettings("Detect.", None, RequestConfig()))


@pytest.mark.req("SYNC-07", "SYNC-09")
def test_changed_weights_are_pushed_and_others_only_to_restarted_servers() -> None:
    backend, policy = recorded()
    backend.version.newest = 6
    policy.repush_restarted()
    assert backend.repushed == []
    policy.push_if_stale()
    policy.push_if_stale()
    policy.repush_restarted()
    assert (backend.pushed, backend.repushed, policy.version) == ([7], [7], 7)
    policy.mark_updated()
    policy.mark_updated()
    assert (policy.is_behind(2), policy.is_behind(3)) == (True, False)
    policy.repush_restarted()
    policy.push_if_stale()
    assert (backend.pushed, backend.repushed, policy.version) == ([7, 8], [7], 8)


@pytest.mark.req("SYNC-07", "SYNC-09")
def test_failed_push_leaves_the_policy_as_it_was() -> None:
    backend, policy = recorded()
    backend.broken = True
    with pytest.raises(RuntimeError, match="the push broke"):
        policy.push_if_stale()
    assert policy.version == 0
    with pytest.raises(AssertionError, match="push_if_stale"):
        policy.answer([], seed=1)
    backend.broken = False
    policy.push_if_stale()
    assert backend.pushed == [1]


# --- The journal of calls and pushes -----------------------------------------------------


A, B = "http://a:1", "http://b:2"
ADDRESSES = (ServerAddress(base_url=A, group_port=7), ServerAddress(base_url=B, group_port=8))


@pytest.mark.req("DIST-05", "SYNC-10", "MET-01")
def test_metrics_count_calls_and_time_the_slowest_push() -> None:
    journal = Journal(ADDRESSES, lambda: ("full", "DoRA"))
    for server, attempt in ((A, 1), (A, 2), (B, 3)):
        journal.call(Call(server, 0, 3, 100, attempt, "answered"))
    assert journal.answered == 9
    journal.lost(A, "gone")
    journal.split(B, range(3, 5))
    pushed = report(5, "p-0", seconds=2.0)
    pushed.seconds |= {"warp": 3.0, "transfer": 9.0}  # a phase of a newer server is no metric
    journal.push(A, False, pushed)
    journal.push(B, True, report(5, "p-0", seconds=8.0, size=6_000_000_000))
    journal.probe(0.2)
    journal.probe(0.3)
    journal.healthy -= 1
    record, payload = journal.take()
    noted = [record[name] for name in ("servers_healthy", "sync_fallback", "splits")]
    assert noted == [1, "DoRA", [(B, 3, 2)]]
    assert payload.metrics() == {
        "rollout/servers_healthy": 1,
        "rollout/servers_lost": 1,
        "rollout/retries": 2,
        "rollout/splits": 1,
        "sync/pushes": 2,
        "sync/repushes": 1,
        "sync/fell_back": 1.0,
        "sync/pause_s": 0.1,
        "sync/transfer_s": 2.0,
        "sync/finish_s": 0.2,
        "sync/total_s": 8.0,
        "sync/probe_s": 0.5,
        "sync/bytes": 6_000_000_000,
        "sync/gb_per_s": 3.0,
    }


# --- Calls that run at the same time -----------------------------------------------------


def test_error_is_raised_while_other_calls_still_run() -> None:
    def fail() -> bool:
        raise ValueError("no")

    hung = threading.Event()
    with pytest.raises(ValueError, match="no"):
        in_parallel([hung.wait, fail])
    hung.set()


@pytest.mark.req("FULL-07")
def test_a_thread_uses_the_gpu_of_the_thread_that_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of_thread = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(of_thread, "gpu", 0))
    monkeypatch.setattr(torch.cuda, "set_device", partial(setattr, of_thread, "gpu"))
    torch.cuda.set_device(3)
    assert in_parallel([partial(in_parallel, [torch.cuda.current_device])]) == [[3]]
