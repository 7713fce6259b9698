"""Several learner processes over the same servers: threads as processes, scripted servers.

Each has a backend of its own; they talk through a `HashStore`, and process 0 alone pushes.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pytest
from torch.distributed import HashStore

from learner.data.jsonl import build_request
from learner.distributed.peers import StorePeers, Timing
from learner.rollout.backend import Journal, PushNeeded
from learner.rollout.client import RolloutClient
from learner.rollout.parallel_calls import Calls, in_parallel
from learner.rollout.policy import Ask, Asking, OpenBackend, Policy
from learner.rollout.server import ServerBackend
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall, RequestConfig, RolloutInferRequest
from tests.unit.fleets import differences
from tests.unit.scripted_rollouts import Fault, ScriptedChannel, ScriptedRollouts, bodies
from tests.unit.scripted_server import Reply, problem, scripted_server

S = ScriptedRollouts
T = TypeVar("T")

# So long a test waits for what has to happen; nothing takes it when all is well.
_LIMIT_S = 60.0


@dataclass
class Rank:
    """One learner process. ended: the exit code, where its watch ended it.

    Its requests are numbered from `first`, and so are the answers.
    """

    peers: StorePeers
    backend: ServerBackend
    journal: Journal
    ended: list[int]

    @property
    def first(self) -> int:
        return 1000 * self.peers.rank

    def ask(
        self, count: int, version: int = 1, beside: bool = False, streamed: bool = False
    ) -> None:
        """Roll out, and hold every output against its request."""
        rollout: Ask = self.backend.rollout
        if beside:
            rollout = self.backend.rollout_asynchronous
        elif streamed:
            rollout = self._streamed
        numbers = range(self.first, self.first + count)
        samples = [Sample(str(number), (), 64, 64, ()) for number in numbers]
        requests = [build_request(sample, "Detect.", None) for sample in samples]
        outputs = rollout(requests, RequestConfig(seed=7 + self.first, max_tokens=4))
        assert [output.response_token_ids for output in outputs] == [[n] for n in numbers]
        assert [output.seed for output in outputs] == [7 + number for number in numbers]
        assert {output.weights_version for output in outputs} == {(version, version)}

    def _streamed(
        self, requests: Sequence[RolloutInferRequest], config: RequestConfig
    ) -> list[RolloutOutput]:
        return [o for chunk in self.backend.stream(requests, config) for o in chunk]

    def ask_in_turn(self, count: int) -> None:
        """`ask`, and then wait for the others as a step does, whoever needs what meanwhile."""
        self.peers.all_gather(partial(self.ask, count), meanwhile=self.backend.heal)

    def notes(self) -> dict[str, float]:
        return self.journal.take()[1].metrics()


@dataclass
class Ranks:
    """All processes of a run, and their servers; channels: of process 0."""

    rollouts: list[ScriptedRollouts]
    channels: list[ScriptedChannel]
    ranks: list[Rank]

    def all(self, work: Callable[[Rank], T]) -> list[T | BaseException]:
        """What `work` returns or raises in each of them, at the same time."""

        def outcome(rank: Rank) -> T | BaseException:
            try:
                with rank.peers.guarded():
                    return work(rank)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - looked at by the test
                return error

        return in_parallel([partial(outcome, rank) for rank in self.ranks])

    def well(self, work: Callable[[Rank], T]) -> list[T]:
        """The same; raises what one of them raises."""
        said = self.all(work)
        results: list[T] = []
        for one in said:
            if isinstance(one, BaseException):
                raise one
            results.append(one)
        return results

    def pushed(self) -> list[list[int]]:
        return [channel.pushed for channel in self.channels]

    def answered(self) -> list[int]:
        """Numbers of all requests that were answered, in order, as often as that was."""
        calls = [call for one in self.rollouts for call in one.answered]
        return sorted(number for call in calls for number in call)


def nothing() -> None:
    """Of a process that has nothing to say."""


def nap(pause_s: float, ended: Sequence[int]) -> None:
    """Instead of the pauses between attempts. ended: the exit code, where the watch has one."""
    if ended:
        raise SystemExit(ended[0])
    time.sleep(min(pause_s, 0.02))


@contextmanager
def ranks(
    servers: int,
    count: int = 2,
    decode_batch_size: int = 4,
    world_sizes: Sequence[int] | None = None,
    timeout_s: float = 20.0,
) -> Iterator[Ranks]:
    with ExitStack() as stack:
        sizes = world_sizes or [1] * servers
        rollouts = [S(stack.enter_context(scripted_server()), size) for size in sizes]
        channels, store, made = [ScriptedChannel(one) for one in rollouts], HashStore(), []
        for number in range(count):
            ended: list[int] = []
            timing = Timing(beat=0.05, grace=0.1)
            peers = StorePeers(number, count, lambda: store, timing, end=ended.append)
            clients = [
                stack.enter_context(
                    RolloutClient(one.server.base_url, timeout_s, live_interval_s=0.05)
                )
                for one in rollouts
            ]
            own, journal = channels if number == 0 else [], Journal([])
            sleep = partial(nap, ended=ended)
            backend = ServerBackend(
                clients, own, decode_batch_size, journal, sleep, differences, peers
            )
            made.append(Rank(peers, backend, journal, ended))
        yield Ranks(rollouts, channels, made)


def begin(rank: Rank) -> None:
    """Connected, with weights 1 pushed."""
    assert rank.backend.connect() == 0
    rank.backend.push_weights(1)
    rank.journal.take()


# --- Pushes -----------------------------------------------------------------------------


@pytest.mark.req("SYNC-08", "RES-04")
def test_process_0_alone_forms_groups_and_pushes_and_all_of_them_ask() -> None:
    def work(rank: Rank) -> dict[str, float]:
        version = rank.backend.connect()
        rank.backend.push_weights(version + 1)
        rank.ask(6, version + 1)
        rank.backend.push_weights(version + 2)
        rank.ask(6, version + 2)
        return rank.notes()

    with ranks(2, count=3) as run:
        for one in run.rollouts:
            one.version = 4
        metrics = run.well(work)
        assert run.pushed() == [[5, 6], [5, 6]]
        assert [channel.groups for channel in run.channels] == [1, 1]
    assert [of_rank["sync/pushes"] for of_rank in metrics] == [4, 0, 0]


@pytest.mark.req("SYNC-09", "SYNC-08")
def test_nobody_asks_before_the_push_of_process_0_has_ended() -> None:
    """Process 1 gets to it first; the push waits until that one would have asked, had it dared."""
    with ranks(1) as run:
        (channel,) = run.channels
        push, late = channel.push, threading.Event()

        def slow_push(version: int) -> object:
            assert not late.wait(0.3), "process 1 has left the push before it ended"
            assert bodies(run.rollouts[0].server) == []
            return push(version)

        def work(rank: Rank) -> None:
            rank.backend.connect()
            rank.backend.push_weights(1)
            late.set()
            rank.ask(2)

        channel.push = slow_push  # type: ignore[method-assign,assignment]
        run.well(work)


@pytest.mark.req("SYNC-09", "SYNC-08")
def test_the_next_push_begins_when_all_have_their_answers() -> None:
    with ranks(1) as run:
        going_on = threading.Event()

        def answer(one: ScriptedRollouts, call: InferCall) -> Reply:
            assert not going_on.wait(0.3)
            assert one.version == 1
            return one.ok(call)

        def work(rank: Rank) -> None:
            begin(rank)
            if rank.peers.rank == 1:
                run.rollouts[0].faults.append(answer)
                rank.ask(1)
            rank.backend.push_weights(2)
            going_on.set()

        run.well(work)
    assert run.pushed() == [[1, 2]]


@pytest.mark.req("SYNC-08", "DDP-01")
def test_a_push_that_fails_in_process_0_raises_the_same_error_in_all() -> None:
    with ranks(1, count=3) as run:

        def work(rank: Rank) -> None:
            begin(rank)
            rank.peers.all_gather(nothing)
            if rank.peers.rank == 0:
                run.channels[0].failures.extend([RunError("broken"), RunError("broken again")])
            rank.backend.push_weights(2)

        errors = run.all(work)
    assert [type(error) for error in errors] == [RunError] * 3
    assert all("broken again" in str(error) for error in errors)
    assert all("learner process 0 failed" in str(error) for error in errors[1:])


@pytest.mark.req("SYNC-08", "SYNC-07")
def test_a_server_that_did_not_take_the_push_is_asked_by_nobody_until_it_has() -> None:
    with ranks(2) as run:
        (broken, _) = run.rollouts

        def work(rank: Rank) -> dict[str, float]:
            begin(rank)
            if rank.peers.rank == 0:
                run.channels[0].failures.append(RunError("the transfer broke"))
            rank.backend.push_weights(2)
            before = len(broken.answered)
            if rank.peers.rank == 1:
                rank.ask(2, version=2)
            rank.peers.all_gather(nothing)
            assert len(broken.answered) == before
            notes = rank.notes()
            if rank.peers.rank == 0:
                rank.ask(2, version=2)  # takes it back
            rank.peers.all_gather(nothing)
            rank.ask(4, version=2)
            return notes

        metrics = run.well(work)
        assert run.pushed() == [[1, 2], [1, 2]]
        assert len(broken.answered) >= 2
    assert [of_rank["rollout/servers_lost"] for of_rank in metrics] == [1, 0]


# --- Shares of the servers --------------------------------------------------------------


@pytest.mark.req("DIST-03", "DIST-04", "RES-04", "FULL-06")
@pytest.mark.parametrize("world_sizes", [[1, 1], [1, 2]])
@pytest.mark.parametrize("count", [2, 3])
def test_together_the_processes_fill_a_server_to_its_bound_and_not_beyond(
    world_sizes: list[int], count: int
) -> None:
    """No call is answered before the servers have as many requests as the ranks ask at once."""
    with ranks(len(world_sizes), count, 3, world_sizes) as run:
        all_there, there = threading.Event(), [0]
        counting = threading.Lock()

        def wait(one: ScriptedRollouts, call: InferCall) -> Reply:
            with counting:
                there[0] += len(call.infer_requests)
                if there[0] == count * (3 * sum(world_sizes) // count):
                    all_there.set()
            assert all_there.wait(_LIMIT_S)
            return one.ok(call)

        def work(rank: Rank) -> int:
            begin(rank)
            rank.peers.all_gather(nothing)
            size = rank.backend.round_size()
            rank.ask(size)
            rank.ask(3 * size)
            rank.ask(5 * size, streamed=True)
            return size

        for one in run.rollouts:
            one.faults.extend([wait] * count)
        sizes = run.well(work)
        assert sizes == [3 * sum(world_sizes) // count] * count
        for one, size in zip(run.rollouts, world_sizes, strict=True):
            assert one.peak <= 3 * size
        assert sum(one.peak for one in run.rollouts) >= sum(sizes)


@pytest.mark.req("DIST-04", "DDP-01")
def test_servers_with_fewer_places_than_processes_are_refused_in_all_of_them() -> None:
    def work(rank: Rank) -> None:
        rank.backend.connect()
        rank.backend.round_size()

    with ranks(1, count=3, decode_batch_size=2) as run:
        errors = run.all(work)
    for error in errors:
        assert isinstance(error, ContractError)
        assert error.where == "rollout_matching.decode_batch_size"


# --- Servers that come back -------------------------------------------------------------


@pytest.mark.req("SYNC-07", "SYNC-08", "DIST-05")
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("hit", [0, 1])
def test_a_server_that_is_started_anew_is_pushed_to_once_and_no_request_is_lost_or_doubled(
    servers: int, hit: int
) -> None:
    """hit: the process whose call meets it."""
    with ranks(servers) as run:

        def work(rank: Rank) -> None:
            begin(rank)
            rank.peers.all_gather(nothing)
            if rank.peers.rank == hit:
                run.rollouts[0].faults.append(S.restart)
            rank.ask_in_turn(6)
            answered.append(run.answered())
            rank.peers.all_gather(nothing)
            for turn in range(2):  # process 0 pushes again before it asks again
                rank.peers.all_gather(partial(rank.ask, 2) if rank.peers.rank == turn else nothing)

        answered: list[list[int]] = []
        run.well(work)
        assert answered == [[*range(6), *range(1000, 1006)]] * 2
        assert run.pushed() == [[1, 1], [1]][:servers]


@pytest.mark.req("SYNC-07", "SYNC-08", "DIST-05")
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_is_killed_and_started_again_while_all_of_them_ask(servers: int) -> None:
    """It dies with calls of both in flight, and is back when both have lost it."""
    with ranks(servers) as run:
        hit, calls = run.rollouts[0], threading.Barrier(2)

        def die(one: ScriptedRollouts, call: InferCall) -> Reply:
            calls.wait(_LIMIT_S)
            return one.die(call)

        def work(rank: Rank) -> None:
            begin(rank)
            rank.peers.all_gather(nothing)
            rank.ask_in_turn(6)

        def start_again() -> None:
            started.wait(_LIMIT_S)
            hit.start_anew()
            hit.dead = False

        started = threading.Event()
        hit.faults.extend([die, die])
        threading.Thread(target=start_again, daemon=True).start()
        threading.Timer(0.3, started.set).start()
        run.well(work)
        assert [channel.pushed for channel in run.channels[1:]] == [[1]] * (servers - 1)
        assert run.answered() == [*range(6), *range(1000, 1006)]
        if servers == 1:
            assert run.pushed() == [[1, 1]]


@pytest.mark.req("SYNC-07", "SYNC-08")
@pytest.mark.parametrize("fault", [S.restart, S.poison, S.lose_the_only_replica, S.lose_a_replica])
def test_process_0_tends_a_server_that_it_does_not_ask_itself(
    fault: Callable[[ScriptedRollouts, InferCall], Reply],
) -> None:
    """Also in the answer to the next call: another epoch is a loss, and a push undoes it."""
    with ranks(1, decode_batch_size=2) as run:

        def work(rank: Rank) -> dict[str, float]:
            begin(rank)
            if rank.peers.rank == 1:
                run.rollouts[0].faults.append(fault)
                rank.ask_in_turn(4)
            else:
                rank.peers.all_gather(nothing, meanwhile=rank.backend.heal)
            return rank.notes()

        metrics = run.well(work)
        assert run.pushed() == [[1, 1]]
    assert [of_rank["sync/repushes"] for of_rank in metrics] == [1, 0]
    assert metrics[1]["rollout/servers_lost"] == 1


@pytest.mark.req("SYNC-07", "SYNC-08", "STEP-03")
def test_process_0_tends_while_it_rolls_out_in_another_thread() -> None:
    """Its own call is not answered before the server was pushed to again for process 1."""
    with ranks(1, decode_batch_size=2) as run:
        (one,) = run.rollouts
        inside, go_on = threading.Event(), threading.Event()

        def wait(one: ScriptedRollouts, call: InferCall) -> Reply:
            inside.set()
            assert go_on.wait(_LIMIT_S)
            return one.ok(call)

        def work(rank: Rank) -> None:
            begin(rank)
            rank.peers.all_gather(nothing)
            if rank.peers.rank == 0:
                one.faults.append(wait)
                calls: Calls[str, None] = Calls()
                calls.start("own", lambda: rank.ask(3))
                rank.peers.all_gather(nothing, meanwhile=rank.backend.heal)
                go_on.set()
                calls.take(_LIMIT_S)[1].result()
                return
            assert inside.wait(_LIMIT_S)
            one.faults.append(S.lose_a_replica)
            rank.ask_in_turn(4)

        run.well(work)
        assert run.pushed() == [[1, 1]]
        assert run.answered() == [0, 1, 2, 1000, 1001, 1002, 1003]


@pytest.mark.req("SYNC-07")
def test_a_push_that_fails_while_process_0_tends_is_made_again() -> None:
    with ranks(1) as run:

        def work(rank: Rank) -> None:
            begin(rank)
            if rank.peers.rank == 1:
                run.channels[0].failures.append(RunError("the transfer broke"))
                run.rollouts[0].faults.append(S.restart)
                rank.ask_in_turn(4)
            else:
                rank.peers.all_gather(nothing, meanwhile=rank.backend.heal)

        run.well(work)
        assert run.pushed() == [[1, 1]]


@pytest.mark.req("SYNC-05", "SYNC-08", "DDP-01")
def test_a_push_that_a_server_refuses_while_process_0_tends_ends_all() -> None:
    with ranks(1) as run:

        def work(rank: Rank) -> None:
            begin(rank)
            if rank.peers.rank == 1:
                refused = RunError("refused")
                refused.__cause__ = ProblemError(Problem.of("manifest-mismatch", "no", "m"))
                run.channels[0].failures.append(refused)
                run.rollouts[0].faults.append(S.restart)
                rank.ask_in_turn(4)
            else:
                rank.peers.all_gather(nothing, meanwhile=rank.backend.heal)

        first, second = run.all(work)
    assert str(first) == "refused"
    assert isinstance(second, (RunError, SystemExit)), "in its rollouts, the watch ends it"


def one_asks(run: Ranks, asking: int, fault: Fault) -> Sequence[object]:
    """What all processes end with when one meets a fault and the other waits for it."""

    def work(rank: Rank) -> None:
        begin(rank)
        rank.peers.all_gather(nothing)
        if rank.peers.rank == asking:
            run.rollouts[0].faults.append(fault)
            rank.ask_in_turn(4)
        else:
            rank.peers.all_gather(nothing, meanwhile=rank.backend.heal)

    return run.all(work)


@pytest.mark.req("DDP-01", "DIST-05")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_whose_rollouts_fail_ends_the_others(failing: int) -> None:
    with ranks(1) as run:
        refuse = problem("invalid-request", "too long", "messages")
        errors = one_asks(run, failing, lambda one, call: refuse)
    for error in errors:
        assert isinstance(error, RunError)
        assert "too long" in str(error)
    assert f"learner process {failing} failed" in str(errors[1 - failing])


@pytest.mark.req("SYNC-04", "DDP-01", "DIST-05")
@pytest.mark.parametrize("waiting", [0, 1])
def test_a_server_that_stays_away_ends_all_processes_with_what_was_waited_for(
    waiting: int,
) -> None:
    with ranks(1, timeout_s=0.3) as run:
        errors = one_asks(run, waiting, S.die)
    for error in errors:
        assert isinstance(error, RunError)
        assert "rollout_matching.vllm.server.timeout_s" in str(error)


# --- While training goes on -------------------------------------------------------------


@pytest.mark.req("ASYNC-01", "SYNC-09")
@pytest.mark.parametrize("asking", [0, 1])
def test_beside_training_a_server_without_the_weights_waits_for_the_next_push(asking: int) -> None:
    with ranks(1) as run:

        def work(rank: Rank) -> None:
            begin(rank)
            if rank.peers.rank == asking:
                run.rollouts[0].faults.append(S.restart)
                with pytest.raises(PushNeeded, match="no rollout server has the weights"):
                    rank.ask(4, beside=True)
                assert run.pushed() == [[1]]
            rank.backend.push_weights(2)
            rank.ask(4, version=2, beside=True)

        run.well(work)
        assert run.pushed() == [[1, 2]]


@pytest.mark.req("ASYNC-01", "DIST-05")
@pytest.mark.parametrize("asking", [0, 1])
def test_beside_training_a_server_that_only_was_out_of_reach_is_asked_again(asking: int) -> None:
    with ranks(1) as run:

        def work(rank: Rank) -> None:
            begin(rank)
            if rank.peers.rank == asking:
                run.rollouts[0].faults.extend([S.hang_up] * 4)
                rank.ask(4, beside=True)

        run.well(work)
        assert run.pushed() == [[1]]


@pytest.mark.req("SYNC-07", "SYNC-09")
def test_weights_that_have_moved_on_are_not_pushed_as_the_last_version() -> None:
    tended: list[int] = []

    class Silent:
        def rollout(self, *_: object) -> list[RolloutOutput]:
            return []

        def push_weights(self, version: int) -> None: ...

        def close(self) -> None: ...

    policy = Policy(
        OpenBackend(Silent(), heal=lambda: tended.append(1)),
        Asking("Detect.", None, RequestConfig()),
    )
    policy.heal()
    assert tended == []
    policy.push_if_stale()
    policy.heal()
    assert tended == [1]
    policy.mark_updated()
    policy.heal()
    assert tended == [1]
