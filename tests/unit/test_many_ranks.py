"""Several learner processes over the same servers: threads as processes, scripted servers.

Each process has its own backend, and process 0 alone pushes.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import pytest
from torch import Tensor
from torch.distributed import HashStore

from learner.distributed.peers import Peers
from learner.distributed.process_group import GroupPeers, Timing
from learner.rollout.backend import Journal, PushNeeded
from learner.rollout.client import Clock, RolloutClient
from learner.rollout.parallel_calls import in_parallel
from learner.rollout.policy import Policy, RequestSettings
from learner.rollout.server_pool import ServerPool
from learner.rollout.server_process import free_ports
from learner.rollout.sync.group import Sender
from learner.rollout.sync.probe import ProofOfEffect
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import MergedWeights, SyncMode
from learner.types import Sample
from shared_contracts.errors import Problem, ProblemError, RunError
from shared_contracts.infer import ChoiceLogprobs, InferCall, RequestConfig, RolloutEnvelope
from shared_contracts.server_info import WorldSize
from shared_contracts.weights import CommunicatorReady, DtypeName, InitCommunicator, SyncReport
from tests.unit.fleets import Fleet, S, differences, scripted_rollouts, wait_until
from tests.unit.push_worker import Weights
from tests.unit.ranks_in_threads import gloo_groups, in_ranks, keep
from tests.unit.scripted_server import (
    INFER,
    Fault,
    Reply,
    ScriptedPusher,
    ScriptedRollouts,
    bodies,
    envelope,
    problem,
    report,
    scripted_server,
)

T = TypeVar("T")

_LIMIT_S = 60.0


class CountedPeers(GroupPeers):
    calls = 0

    def all_gather(self, *given: Any, **named: Any) -> list[Any]:
        self.calls += 1
        return super().all_gather(*given, **named)

    def await_calls(self, count: int) -> None:
        wait_until(lambda: self.calls >= count)


@dataclass(kw_only=True)
class Rank(Fleet):
    peers: CountedPeers

    def ask_and_meet(self, count: int) -> None:
        self.peers.all_gather(
            lambda: bool(self.ask(count)), meanwhile=self.backend.repush_restarted
        )

    def meet(self) -> None:
        self.peers.all_gather(nothing)


@dataclass
class Ranks:
    """All processes of a run, and their servers. pushers: of process 0."""

    rollouts: list[ScriptedRollouts]
    pushers: list[ScriptedPusher]
    ranks: list[Rank]

    def outcomes(self, work: Callable[[Rank], T]) -> list[T | BaseException]:
        def outcome(rank: Rank) -> T | BaseException:
            try:
                with rank.peers.guarded():
                    return work(rank)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the test checks it
                return error

        return in_parallel([partial(outcome, rank) for rank in self.ranks])

    def results(self, work: Callable[[Rank], T]) -> list[T]:
        results: list[T] = []
        for outcome in self.outcomes(work):
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return results

    def pushed(self) -> list[list[int]]:
        return self.ranks[0].pushed()

    def answered(self) -> list[int]:
        calls = [call for one in self.rollouts for call in one.answered]
        return sorted(number for call in calls for number in call)


def nothing() -> None: ...


@contextmanager
def ranks(
    servers: int,
    count: int = 2,
    decode_batch_size: int = 4,
    world_sizes: Sequence[int] | None = None,
    **options: Any,
) -> Iterator[Ranks]:
    with scripted_rollouts(world_sizes or [1] * servers) as rollouts:
        pushers, store, made = [ScriptedPusher(one) for one in rollouts], HashStore(), []
        keep(groups := gloo_groups(store, count))
        for number in range(count):
            clock, timing = ShortPauses(), Timing(beat=0.05, grace=0.1, linger=_LIMIT_S)
            peers = CountedPeers(number, count, store, groups[number], timing, end=clock.end)
            urls = [one.server.base_url for one in rollouts]
            clients = [RolloutClient(url, _LIMIT_S, live_interval_s=0.05) for url in urls]
            journal, own = Journal(), pushers if number == 0 else []
            backend = ServerPool(
                clients, own, decode_batch_size, journal, differences, peers, clock=clock, **options
            )
            made.append(
                Rank(
                    rollouts=rollouts,
                    pushers=pushers,
                    journal=journal,
                    backend=backend,
                    first=1000 * number,
                    peers=peers,
                )
            )
        yield Ranks(rollouts, pushers, made)


class ShortPauses(Clock):
    """Pauses of a process, until its watch has ended it."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        self._ended.set()

    def sleep(self, seconds: float) -> None:
        if self._ended.wait(min(seconds, 0.02)):
            raise SystemExit(1)


def begin(rank: Rank) -> None:
    """Connect, and push weights 1; four calls of `all_gather`."""
    assert rank.backend.connect() == 0
    rank.backend.push_weights(1)
    rank.journal.take()


@pytest.mark.req("SYNC-09", "SYNC-08")
def test_no_process_asks_before_the_push_of_process_0_has_ended() -> None:
    with ranks(1) as run:
        (pusher,) = run.pushers
        push = pusher.push
        events: list[str] = []

        def late_push(version: int) -> object:
            run.ranks[1].peers.await_calls(3)
            report = push(version)
            events.append("pushed")
            return report

        def answer(one: ScriptedRollouts, call: InferCall) -> Reply:
            events.append("requested")
            return one.ok(call)

        def work(rank: Rank) -> None:
            begin(rank)
            rank.ask(2)

        pusher.push = late_push  # type: ignore[method-assign,assignment]
        run.rollouts[0].faults.extend([answer] * 2)
        run.results(work)
    assert events[0] == "pushed"


@pytest.mark.req("SYNC-09", "SYNC-08")
def test_next_push_begins_when_all_processes_have_their_answers() -> None:
    with ranks(1) as run:
        versions: list[int | None] = []

        def answer(one: ScriptedRollouts, call: InferCall) -> Reply:
            run.ranks[0].peers.await_calls(5)
            versions.append(one.version)
            return one.ok(call)

        def work(rank: Rank) -> None:
            begin(rank)
            if rank.peers.rank == 1:
                run.rollouts[0].faults.append(answer)
                rank.ask(1)
            rank.backend.push_weights(2)

        run.results(work)
    assert versions == [1]
    assert run.pushed() == [[1, 2]]


@pytest.mark.req("SYNC-06", "SYNC-08")
def test_process_0_asks_for_the_proof_and_all_processes_compare() -> None:
    compared: list[tuple[str, int]] = []

    class Proof(ProofOfEffect):
        def check(self, url: str, envelopes: Sequence[RolloutEnvelope], dtype: DtypeName) -> float:
            compared.append((url, len(envelopes)))
            return 0.0

    with ranks(1, count=3, proof=Proof(cast(Any, None), "full")) as run:
        server = run.rollouts[0].server
        answers = [envelope([number], [1]) for number in range(2)]
        for answer in answers:
            answer.response.choices[0].logprobs = ChoiceLogprobs.of([-0.1])
        server.routes[INFER] = lambda _: answers
        run.results(begin)
        assert len(bodies(server)) == 1
        assert compared == [(server.base_url, 2)] * 3


@pytest.mark.req("ROLL-03", "FULL-07")
def test_every_process_gives_up_a_group_that_the_server_refuses() -> None:
    """Nothing opens the group, and its limit is far away."""
    left = threading.Semaphore(0)

    def join(body: InitCommunicator, given_up: threading.Event, number: int) -> Sender:
        assert given_up.wait(_LIMIT_S)
        left.release()
        raise ConnectionAbortedError("the group was given up")

    with scripted_server() as server:
        client = RolloutClient(server.base_url, _LIMIT_S)
        server.routes["GET /get_world_size/"] = lambda _: WorldSize(world_size=2)
        refusal = problem("group-port-taken", "the port is taken", "port")
        server.routes["POST /init_communicator/"] = lambda _: refusal
        mode, (port,) = SyncMode(MergedWeights(Weights()), None, False), free_ports(1)

        def work(peers: Peers) -> None:
            pusher = WeightPusher(client, port, mode, "gloo", 256, peers, join)
            with pytest.raises(RunError, match="the port is taken"):
                pusher.push_together(1, "bfloat16")

        for rank in in_ranks(2, work):
            rank.result()
    assert all(left.acquire(timeout=_LIMIT_S) for _ in range(2))


class Sharded(MergedWeights):
    def __init__(self, together: threading.Barrier) -> None:
        super().__init__(Weights())
        self._together = together

    def stream(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        for weight in self.tensors(dtype):
            self._together.wait()
            yield weight


class PatientSender(Sender):
    left = False

    def __init__(self) -> None: ...

    def send(self, parameters: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        deque(weights, maxlen=0)

    def abandon(self) -> None:
        self.left = True


class LosingSender(PatientSender):
    pushes = 0

    def send(self, parameters: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.pushes += 1
        if self.pushes == 2:
            next(iter(weights))
            raise RuntimeError("its worker is gone")
        super().send(parameters, weights)


@pytest.mark.req("ROLL-03", "SYNC-08")
def test_a_process_whose_send_breaks_gathers_on_and_the_next_group_is_another() -> None:
    together, status = threading.Barrier(2, timeout=10.0), report(0, "e").status
    made, late = list[PatientSender](), [TimeoutError("no store")]
    ready = CommunicatorReady(
        weights_version=0, world_size=4, transport="gloo", server_epoch="e", dtype="float32"
    )
    with scripted_server() as server:
        client = RolloutClient(server.base_url, _LIMIT_S)
        server.routes["GET /get_world_size/"] = lambda _: WorldSize(world_size=2)
        server.routes["POST /init_communicator/"] = lambda _: ready
        for phase in ("start_weight_update", "update_weights"):
            server.routes[f"POST /{phase}/"] = lambda _: status
        server.routes["POST /finish_weight_update/"] = lambda _: report(1, "e")

        def work(peers: Peers) -> None:
            mode = SyncMode(Sharded(together), None, False)
            kind = LosingSender if peers.rank else PatientSender

            def join(*_: object) -> Sender:
                if peers.rank and late:
                    raise late.pop()
                made.append(kind())
                return made[-1]

            pusher = WeightPusher(client, 1, mode, "gloo", 256, peers, join)
            if peers.rank == 0:
                pusher.connect()
            for failure in ("rendezvous: no store", None, "transfer: its worker is gone", None):
                if failure is None:
                    pusher.push_together(1, "float32")
                    continue
                with pytest.raises(RunError, match=f"process 1.*{failure}"):
                    pusher.push_together(1, "float32")
                if peers.rank == 0:
                    pusher.abandon()

        for rank in in_ranks(2, work):
            rank.result()
        senders = [body["senders"] for body in server.bodies("POST /init_communicator/")]
    assert senders == [1, 2, 2, 2]
    assert [each.left for each in made].count(False) == 2, "the newest of each process"
    assert not together.broken


@pytest.mark.req("ROLL-03", "SYNC-07")
def test_after_a_push_by_all_that_breaks_process_0_pushes_alone() -> None:
    class Shared:
        """The pusher of all processes; its second push breaks."""

        def push_together(self, version: int, dtype: DtypeName) -> SyncReport:
            one = run.rollouts[0]
            if version == 2:
                raise RunError("a worker is gone")
            one.version = version
            return report(version, one.epoch)

        def close(self) -> None: ...

    def work(rank: Rank) -> None:
        begin(rank)
        for version in (2, 3):
            rank.backend.push_weights(version)
            rank.ask(2, version)

    with ranks(1, together=Shared()) as run:
        run.results(work)
        assert run.pushed() == [[2]]


@pytest.mark.req("DIST-03", "DIST-04", "RES-04", "FULL-06")
@pytest.mark.parametrize(("world_sizes", "count"), [([1, 1], 2), ([1, 2], 2), ([1, 2], 3)])
def test_processes_fill_the_servers_up_to_their_bound(world_sizes: list[int], count: int) -> None:
    """No call is answered before the servers have as many requests as all ranks send at once."""
    with ranks(len(world_sizes), count, 3, world_sizes) as run:
        there = list[int]()

        def wait(one: ScriptedRollouts, call: InferCall) -> Reply:
            there.append(len(call.infer_requests))
            wait_until(lambda: sum(there) >= count * (3 * sum(world_sizes) // count))
            return one.ok(call)

        def work(rank: Rank) -> int:
            begin(rank)
            rank.meet()
            size = rank.backend.round_size
            rank.ask(size)
            rank.ask(3 * size)
            rank.ask(5 * size, how="stream")
            return size

        for one in run.rollouts:
            one.faults.extend([wait] * count)
        sizes = run.results(work)
        assert sizes == [3 * sum(world_sizes) // count] * count
        for one, size in zip(run.rollouts, world_sizes, strict=True):
            assert one.peak <= 3 * size
        assert sum(one.peak for one in run.rollouts) >= sum(sizes)


@pytest.mark.req("SYNC-08", "SYNC-09", "RES-04", "RES-14")
def test_multi_process_learner_does_not_deadlock_in_server_mode() -> None:
    def work(rank: Rank) -> list[int]:
        asking = RequestSettings("Detect.", None, RequestConfig(max_tokens=4))
        rank.backend.connect()
        policy, answered = Policy(rank.backend, asking), []
        for step in range(3):
            policy.push_if_stale()
            number = 10 * step + rank.peers.rank
            policy.answer([Sample(str(number), (), 64, 64, ())], seed=1 + number)
            rank.peers.all_gather(nothing, meanwhile=policy.repush_restarted)
            policy.mark_updated()
            answered.append(number)
        return answered

    with ranks(servers=2) as run:
        for one in run.rollouts:
            one.version = 4
        sent = run.results(work)
        calls = [call for one in run.rollouts for call in bodies(one.server)]
        assert run.pushed() == [[5, 6, 7]] * 2, "by process 0, once for each step"
        assert [pusher.groups for pusher in run.pushers] == [1, 1]
    assert sent == [[0, 10, 20], [1, 11, 21]]
    numbers = [int(str(call.infer_requests[0].uuid)) for call in calls]
    assert sorted(numbers) == [0, 1, 10, 11, 20, 21]
    assert [call.expected_weights_version for call in calls] == [n // 10 + 5 for n in numbers]


@pytest.mark.req("SYNC-07", "SYNC-08", "DIST-05")
@pytest.mark.parametrize("servers", [1, 2])
def test_server_is_killed_and_started_again_while_all_processes_ask(servers: int) -> None:
    """It dies with a call of both in flight, and is back once both have lost it."""
    with ranks(servers) as run:
        hit, calls = run.rollouts[0], threading.Barrier(2)

        def die(one: ScriptedRollouts, call: InferCall) -> Reply:
            calls.wait(_LIMIT_S)
            return one.die(call)

        def work(rank: Rank) -> None:
            begin(rank)
            rank.meet()
            rank.ask_and_meet(6)

        def start_again() -> None:
            wait_until(lambda: all(rank.backend.servers[0].lost for rank in run.ranks))
            hit.restart_process()
            hit.dead = False

        hit.faults.extend([die, die])
        threading.Thread(target=start_again, daemon=True).start()
        run.results(work)
        assert [pusher.pushed for pusher in run.pushers[1:]] == [[1]] * (servers - 1)
        assert run.answered() == [*range(6), *range(1000, 1006)]
        if servers == 1:
            assert run.pushed() == [[1, 1]]


@pytest.mark.req("DIST-03", "DIST-05")
def test_a_process_with_no_place_at_the_servers_that_are_left_gets_one() -> None:
    """Each of two processes has one place, at a server of its own; that of process 1 dies."""

    def work(rank: Rank) -> None:
        begin(rank)
        rank.meet()
        rank.ask_and_meet(2)

    with ranks(2, decode_batch_size=1) as run:
        run.rollouts[1].faults.append(S.die)
        run.results(work)
        assert run.rollouts[1].answered == []
        assert run.answered() == [0, 1, 1000, 1001]


def one_asks(run: Ranks, fault: Fault) -> Sequence[Any]:
    """Notes or errors of both processes: process 1 meets a fault, and process 0 waits for it."""

    def work(rank: Rank) -> dict[str, float]:
        begin(rank)
        rank.meet()
        if rank.peers.rank == 1:
            run.rollouts[0].faults.append(fault)
            rank.ask_and_meet(4)
        else:
            rank.peers.all_gather(nothing, meanwhile=rank.backend.repush_restarted)
        return rank.notes()[1]

    return run.outcomes(work)


@pytest.mark.req("SYNC-07", "SYNC-08")
@pytest.mark.parametrize("fault", [S.restart, S.break_a_push, S.lose_a_replica])
def test_process_0_repairs_a_server_that_it_does_not_ask(fault: Fault) -> None:
    with ranks(1, decode_batch_size=2) as run:
        metrics = one_asks(run, fault)
        assert run.pushed() == [[1, 1]]
    assert [of_rank["sync/repushes"] for of_rank in metrics] == [1, 0]
    assert metrics[1]["rollout/servers_lost"] == 1


@pytest.mark.req("SYNC-07", "SYNC-05", "SYNC-08", "DDP-01")
@pytest.mark.parametrize("refused", [False, True])
def test_failed_repair_is_repeated_unless_the_server_refused_the_weights(refused: bool) -> None:
    with ranks(1) as run:
        failure = RunError("the transfer broke")
        if refused:
            failure.__cause__ = ProblemError(Problem.of("manifest-mismatch", "no", "m"))

        def restart(one: ScriptedRollouts, call: InferCall) -> Reply:
            run.pushers[0].failures.append(failure)
            return one.restart(call)

        first, second = one_asks(run, restart)
        if refused:
            assert str(first) == "the transfer broke"
            assert isinstance(second, RunError | SystemExit), "its watch can end it"
        else:
            assert (first["sync/repushes"], second["sync/repushes"]) == (1, 0)
            assert run.pushed() == [[1, 1]]


@pytest.mark.req("ASYNC-01", "SYNC-09", "DIST-05")
@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("needs_push", [True, False])
def test_beside_training_a_stale_server_waits_for_a_push(asking: int, needs_push: bool) -> None:
    with ranks(1) as run:

        def work(rank: Rank) -> None:
            begin(rank)
            if rank.peers.rank == asking and needs_push:
                run.rollouts[0].faults.append([S.restart, S.break_a_push][asking])
                run.rollouts[0].world_size = 3
                with pytest.raises(PushNeeded, match="no rollout server has the weights"):
                    rank.ask(4, how="rollout_asynchronous")
            elif rank.peers.rank == asking:
                run.rollouts[0].faults.extend([S.hang_up] * 4)
                rank.ask(4, how="rollout_asynchronous")
            assert run.pushed() == [[1]]
            rank.backend.push_weights(2)
            assert rank.backend.servers[0].world_size == run.rollouts[0].world_size
            rank.ask(4, version=2, how="rollout_asynchronous")

        run.results(work)
        assert run.pushed() == [[1, 2]]
