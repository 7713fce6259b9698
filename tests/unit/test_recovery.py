"""Calls, servers and pushes that fail: what is retried, what is pushed again, what ends the run."""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.rollout.backend import Journal, PushNeeded
from learner.rollout.server import ATTEMPTS, FIRST_REST_S
from learner.rollout.server_pool import LONGEST_WAIT_S, MOST_ATTEMPTS
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall
from shared_contracts.weights import DtypeName
from tests.unit.fleets import Fleet, S, fleet, fleet_of, scripted_rollouts, wait_until
from tests.unit.scripted_server import (
    INFER,
    Fault,
    Reply,
    ScriptedRollouts,
    bodies,
    envelope,
    problem,
)

_LIMIT_S = 60.0

# --- Calls that fail ---------------------------------------------------------------------


@pytest.mark.req("DIST-05")
@pytest.mark.parametrize("fault", [S.hang_up, S.hang_up_half_way, S.not_ready, S.gateway])
def test_temporary_fault_is_retried_at_the_same_server_as_the_same_call(fault: Fault) -> None:
    with fleet(2) as run:
        run.rollouts[0].faults.extend([fault, fault])
        run.ask(6)
        calls = bodies(run.rollouts[0].server)
        lost, metrics = run.notes()
    assert len(calls) == 3
    assert calls[0] == calls[1] == calls[2]
    assert (lost, metrics["rollout/retries"], metrics["rollout/splits"]) == ([], 2, 0)
    assert run.pushed() == [[1], [1]]


@pytest.mark.req("DIST-05")
def test_pauses_grow() -> None:
    with fleet(1) as run:
        run.rollouts[0].faults.extend([S.not_ready, S.not_ready, S.too_many])
        run.ask(2)
    assert run.clock.pauses == [1.0, 2.0, 4.0]


@pytest.mark.req("DIST-05", "RES-26")
@pytest.mark.parametrize(
    ("fault", "names_proxy"), [(S.hang_up, True), (S.gateway_timeout, True), (S.not_ready, False)]
)
def test_calls_that_a_proxy_may_have_cut_name_the_ways_out(fault: Fault, names_proxy: bool) -> None:
    with fleet(2) as run:
        run.rollouts[0].faults.extend([fault] * ATTEMPTS)
        run.ask(2)
        ((url, reason),), _ = run.notes()
    assert url == run.rollouts[0].server.base_url
    ways_out = ["its read timeout", "decode_batch_size", "servers[].base_url"]
    assert all((way in reason) is names_proxy for way in ways_out)


# It names the sample, whose uuid is 1.
OF_THE_SECOND = Problem.of(
    "invalid-request",
    "1 bad request(s)",
    "infer_requests[1].images[0]",
    [{"index": 1, "where": "infer_requests[1].images[0]", "detail": "it cannot be read"}],
)


@pytest.mark.req("DIST-01", "DIST-05", "SRV-06", "WIRE-02", "WIRE-05")
@pytest.mark.parametrize(
    ("reply", "error", "found"),
    [
        (problem("invalid-request", "too long", "messages"), ProblemError, "too long"),
        (problem("body-too-large", "9 MiB", "body"), ProblemError, "9 MiB"),
        (problem("unauthorized", "no", "header"), ContractError, "ROLLOUT_SERVER_TOKEN"),
        ([envelope([0], [1])] * 3, ProblemError, "3 envelopes for 2 requests"),
        ((OF_THE_SECOND.status, OF_THE_SECOND), ProblemError, r"1 bad request\(s\); of 1$"),
    ],
)
def test_refused_request_ends_the_run(reply: Reply, error: type[Exception], found: str) -> None:
    with fleet(2) as run:
        run.rollouts[0].server.routes[INFER] = lambda _: reply
        with pytest.raises(error, match=found):
            run.ask(4)
        assert len(bodies(run.rollouts[0].server)) == 1
        assert run.clock.pauses == []


# --- A lost server among others ---------------------------------------------------------


@pytest.mark.req("DIST-05", "SEED-01")
def test_chunk_of_a_dead_server_is_split_among_the_others() -> None:
    with fleet(3) as run:
        run.rollouts[0].faults.append(S.die)
        run.ask(9)
        lost, metrics = run.notes()
        taken = [sorted(one.answered) for one in run.rollouts]
    assert taken == [[], [[0, 1], [3, 4, 5]], [[2], [6, 7, 8]]]
    assert [url for url, _ in lost] == [run.rollouts[0].server.base_url]
    assert metrics["rollout/splits"] == 2
    assert metrics["rollout/retries"] == ATTEMPTS - 1 + 2
    assert metrics["rollout/servers_healthy"] == 2
    assert metrics["rollout/servers_lost"] == 1
    assert run.pushed() == [[1], [1], [1]]


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The parts that servers have taken over so far."""
    parts: list[range] = []
    monkeypatch.setattr(Journal, "split", lambda _, server, part: parts.append(part))
    return parts


@pytest.mark.req("DIST-05", "FULL-06")
def test_requests_of_a_lost_server_come_before_later_ones(splits: list[range]) -> None:
    def answer_late(one: ScriptedRollouts, call: InferCall) -> Reply:
        wait_until(lambda: len(splits) == 2)
        return one.ok(call)

    with fleet(2, decode_batch_size=1) as run:
        run.rollouts[0].faults.append(S.die)
        run.rollouts[1].faults.append(answer_late)
        run.ask(6)
    assert splits == [range(1), range(1, 3)]
    assert run.rollouts[1].answered == [[3], [0], [1], [2], [4], [5]]


@pytest.mark.req("DIST-05", "WIRE-03")
def test_call_that_is_repeated_in_parts_has_new_ids_and_counts_on(splits: list[range]) -> None:
    """The first server has two places. When it comes back, three requests wait for them."""

    def fail_late(one: ScriptedRollouts, call: InferCall) -> Reply:
        wait_until(lambda: splits)
        return one.hang_up(call)

    with fleet(2, decode_batch_size=1, world_sizes=[2, 1]) as run:
        run.rollouts[0].faults.extend([fail_late] * ATTEMPTS)
        run.rollouts[1].faults.append(S.die)
        run.ask(3)
        _, metrics = run.notes()
    assert splits == [range(2, 3)]
    assert sorted(run.rollouts[0].answered) == [[0], [1], [2]]
    assert metrics["rollout/retries"] == 2 * (ATTEMPTS - 1) + 3


@pytest.mark.req("SYNC-07", "DIST-05")
def test_lost_server_is_checked_once_before_every_rollout_and_push() -> None:
    with fleet(2) as run:
        dead = run.rollouts[0]
        dead.faults.append(S.die)
        run.ask(4)
        run.ask(4)
        run.backend.push_weights(2)
        run.ask(4, version=2)
        assert len(dead.server.bodies("GET /health/")) == 3
        assert len(bodies(dead.server)) == ATTEMPTS
    assert run.pushed() == [[1], [1, 2]]


def vanish(one: ScriptedRollouts, _: InferCall) -> Reply:
    """It has restarted, and is gone before it names its epoch."""
    one.dead = True
    return problem("other-weights", "version 0 is held", "weights")


@pytest.mark.req("SYNC-07", "DIST-05")
@pytest.mark.parametrize(
    ("faults", "counts", "pushed"),
    [
        ([[vanish], []], [4], [[1], [1]]),
        ([[S.restart], []], [4], [[1], [1]]),
        ([[S.restart], []], [4, 4], [[1, 1], [1]]),
        ([[S.break_a_push], []], [4, 4], [[1, 1], [1]]),
        ([[S.lose_the_only_replica], []], [4, 4], [[1, 1], [1]]),
        ([[S.die], [S.restart]], [4], [[1], [1, 1]]),
        ([[S.ok, S.restart]], [6], [[1, 1]]),
        ([[S.ok, S.break_a_push]], [6], [[1, 1]]),
        ([[S.ok, S.lose_the_only_replica]], [6], [[1, 1]]),
        ([[S.lose_a_replica]], [6], [[1, 1]]),
        ([[S.hang_up] * ATTEMPTS], [2], [[1]]),
        ([[S.fall_asleep]], [2], [[1]]),
    ],
)
def test_only_servers_without_the_weights_are_pushed_to_again(
    faults: list[list[Fault]], counts: list[int], pushed: list[list[int]]
) -> None:
    """Before the next rollout; at once where no other server is left."""
    with fleet(len(faults), decode_batch_size=2) as run:
        for one, planned in zip(run.rollouts, faults, strict=True):
            one.faults.extend(planned)
        for count in counts:
            run.ask(count)
        assert run.pushed() == pushed
        answered = [number for one in run.rollouts for call in one.answered for number in call]
        assert sorted(answered) == sorted(number for count in counts for number in range(count))
        _, metrics = run.notes()
        assert metrics["sync/repushes"] == sum(map(len, pushed)) - len(faults)


@pytest.mark.req("DIST-05")
def test_server_that_comes_back_gets_the_same_call_again(splits: list[range]) -> None:
    """So that it recognizes the call, which it may be generating."""
    with fleet(1) as run:
        run.rollouts[0].faults.extend([S.hang_up] * ATTEMPTS)
        run.ask(2)
        first, *others = bodies(run.rollouts[0].server)
    assert others == [first] * ATTEMPTS
    assert splits == []


@pytest.mark.req("ROLL-03", "SYNC-07")
def test_a_sleeping_server_is_woken_only_by_a_rollout_that_may_push() -> None:
    with fleet(1) as run:
        run.rollouts[0].asleep = True
        with pytest.raises(PushNeeded, match="replica 0 is asleep"):
            run.ask(2, how="rollout_asynchronous")
        assert run.rollouts[0].asleep
        run.ask(2)
        assert run.pushed() == [[1]]


@pytest.mark.req("SYNC-07", "WIRE-03")
@pytest.mark.parametrize("lost", [True, False])
def test_server_that_another_learner_has_taken_ends_the_run(lost: bool) -> None:
    with fleet(2) as run:
        if lost:
            run.rollouts[0].faults.append(S.lose_the_only_replica)
            run.ask(4)
            found = "another learner has taken this server over"
            run.pushers[0].refuses = ContractError("http://a:1", found, "End it")
        else:
            run.rollouts[0].version = 8
        with pytest.raises(ContractError if lost else ProblemError, match="another learner"):
            run.ask(4)
    assert run.pushed() == [[1], [1]]


# --- No server is left ------------------------------------------------------------------


@pytest.mark.req("SYNC-07", "SYNC-04")
def test_server_that_stays_away_ends_the_run_with_the_reason() -> None:
    with fleet(1) as run:
        run.rollouts[0].faults.append(S.die)
        with pytest.raises(RunError) as caught:
            run.ask(2)
    url = run.rollouts[0].server.base_url
    assert f"{url}: GET {url}/health/" in str(caught.value)
    assert "waited 60 s (rollout_matching.vllm.server.timeout_s)" in str(caught.value)


@pytest.mark.req("ROLL-03")
def test_server_that_is_gone_for_good_is_not_waited_for() -> None:
    """A colocated server that has ended too often is such a server."""

    def check() -> None:
        raise RunError("it ended 6 times")

    with scripted_rollouts([1]) as rollouts, fleet_of(rollouts, 8, check=check) as run:
        rollouts[0].faults.append(S.die)
        with pytest.raises(RunError, match="it ended 6 times"):
            run.ask(2)
        assert run.clock.now < _LIMIT_S


def starting(run: Fleet, seconds: float) -> ScriptedRollouts:
    """The only server: every call of its `/health/` advances the clock."""
    (one,) = run.rollouts
    health = one.server.routes["GET /health/"]

    def slow_health(body: object) -> Reply:
        run.clock.now += seconds
        return health(body)

    one.server.routes["GET /health/"] = slow_health
    return one


@pytest.mark.req("SYNC-07", "DIST-05")
@pytest.mark.parametrize("at", ["rollout", "push"])
def test_server_that_reports_that_it_starts_is_waited_for_longer_than_a_silent_one(at: str) -> None:
    with fleet(1) as run:
        one = starting(run, seconds=50.0)
        one.starting_looks = 5
        if at == "rollout":
            one.faults.extend([S.lose_the_only_replica, *[S.hang_up] * ATTEMPTS])
            run.ask(2)
            assert run.pushed() == [[1, 1]]
        else:
            one.restart_process()
            run.backend.push_weights(2)
            assert run.pushed() == [[1, 2]]
        assert one.starting_looks == 0


@pytest.mark.req("SYNC-07")
def test_server_that_starts_for_ever_ends_the_run() -> None:
    with fleet(1) as run:
        one = starting(run, seconds=LONGEST_WAIT_S / 10)
        one.starting_looks = 10**9
        one.faults.append(S.lose_the_only_replica)
        with pytest.raises(RunError, match=r"the longest wait.*replica 0 is starting"):
            run.ask(2)


@pytest.mark.req("SYNC-07")
def test_a_call_that_began_before_a_restart_does_not_lose_the_server_again() -> None:
    with fleet(1) as run:
        (server,) = run.backend.servers
        began = server.epoch
        run.rollouts[0].faults.append(S.restart)
        run.rollouts[0].world_size = 3
        run.ask(2)
        assert (server.epoch != began, server.world_size) == (True, 3)
        server.lose("an answer of before", began)
        assert run.backend.usable() == [server]
        server.lose("an answer of now", server.epoch)
        assert run.backend.usable() == []


@pytest.mark.req("SYNC-07", "REP-06")
def test_server_that_comes_back_with_other_settings_is_not_pushed_to() -> None:
    with fleet(2) as run:
        other = run.rollouts[0]
        other.faults.append(S.restart)
        other.guarded = False
        run.ask(4)
        run.ask(4)
        run.backend.push_weights(2)
        run.ask(4, version=2)
        assert run.pushed() == [[1], [1, 2]]
        run.rollouts[1].faults.append(S.die)
        with pytest.raises(RunError, match=f"{other.server.base_url} .*the guard is off"):
            run.ask(4, version=2)


@pytest.mark.req("SYNC-07")
@pytest.mark.parametrize(("rest_s", "tries"), [(0.0, 1), (FIRST_REST_S + 1, 3), (600.0, 4)])
def test_server_whose_group_cannot_be_formed_rests_before_a_try(rest_s: float, tries: int) -> None:
    with fleet(2) as run:
        run.rollouts[0].faults.append(S.restart)
        run.ask(4)
        blocked, before = run.pushers[0], run.pushers[0].tries
        blocked.refuses = RunError("the port of the group is blocked")
        run.ask(4)
        run.clock.now += rest_s
        run.ask(4)
        run.clock.now += rest_s
        run.backend.push_weights(2)
        run.clock.now += rest_s
        run.ask(4, version=2)
        assert blocked.tries - before == tries
        lost, metrics = run.notes()
    assert [url for url, _ in lost] == [run.rollouts[0].server.base_url]
    assert metrics["rollout/servers_lost"] == 1


@pytest.mark.req("DIST-05")
@pytest.mark.parametrize("answers_between", [1, 0])
def test_returns_without_an_answer_between_them_end_the_run(answers_between: int) -> None:
    """They take longer than `timeout_s` in both cases."""
    with fleet(1, decode_batch_size=1) as run:
        faults = ([S.hang_up] * ATTEMPTS + [S.ok] * answers_between) * 25
        run.rollouts[0].faults.extend(faults)
        if answers_between:
            run.ask(25)
        else:
            with pytest.raises(RunError, match=r"some come back: \d\d attempts .*read timeout"):
                run.ask(25)
            assert len(bodies(run.rollouts[0].server)) >= MOST_ATTEMPTS
        assert run.clock.now > _LIMIT_S


@pytest.mark.req("SYNC-08")
def test_no_thread_waits_for_a_lost_server_after_the_backend_is_closed() -> None:
    with fleet(1) as run:
        server = run.rollouts[0].server
        run.rollouts[0].faults.extend([S.hang_up] * ATTEMPTS)
        checks = []

        def close(_: object) -> Reply:
            checks.append(run.clock.now)
            run.backend.close()
            return problem("not-ready", "its engine is being built", "replicas[0]")

        server.routes["GET /health/"] = close
        with pytest.raises(RunError, match="the rollout servers were left"):
            run.ask(1)
        assert len(checks) == 1


# --- Pushes that break ------------------------------------------------------------------


@pytest.mark.req("SYNC-07", "SYNC-09")
def test_server_at_which_a_push_breaks_is_not_used_until_it_has_the_weights() -> None:
    with fleet(2) as run:
        run.pushers[0].failures.append(RunError("the transfer broke"))
        run.backend.push_weights(2)
        assert run.pushed() == [[1], [1, 2]]
        run.ask(4, version=2)
        lost, metrics = run.notes()
    assert run.pushed() == [[1, 2], [1, 2]]
    assert lost == [(run.rollouts[0].server.base_url, "the transfer broke")]
    assert (metrics["sync/pushes"], metrics["sync/repushes"]) == (2, 1)


@pytest.mark.req("SYNC-07")
def test_push_that_breaks_everywhere_is_tried_once_more() -> None:
    with fleet(1) as run:
        run.pushers[0].failures.append(RunError("the transfer broke"))
        run.backend.push_weights(2)
        run.ask(2, version=2)
        assert run.pushers[0].groups == 2
        run.pushers[0].failures.extend([RunError("broken"), RunError("broken again")])
        with pytest.raises(RunError, match="broken again"):
            run.backend.push_weights(3)


@pytest.mark.req("SYNC-01", "SYNC-07")
@pytest.mark.parametrize(
    ("server", "pusher", "pushed"),
    [
        ({"process": 2, "version": 0}, {}, [1, 2]),
        ({}, {"answer_lost": True}, [1, 2]),
        ({}, {"loses_a_replica": True}, [1, 2, 2]),
        ({"losses": 1, "stale": True}, {"forms_anew": True}, [1, 2]),  # as after a failed adapter
    ],
)
def test_push_arrives_after_every_event(
    server: dict[str, Any], pusher: dict[str, Any], pushed: list[int]
) -> None:
    with fleet(1) as run:
        vars(run.rollouts[0]).update(server)
        vars(run.pushers[0]).update(pusher)
        run.backend.push_weights(2)
        run.ask(2, version=2)
    assert run.pushed() == [pushed]


@pytest.mark.req("SYNC-05", "SYNC-07")
def test_push_that_a_server_refuses_ends_the_run_at_once() -> None:
    with fleet(2) as run:
        refused = RunError("refused")
        refused.__cause__ = ProblemError(Problem.of("manifest-mismatch", "no such name", "m"))
        run.pushers[0].failures.append(refused)
        with pytest.raises(RunError, match="refused"):
            run.backend.push_weights(2)


@pytest.mark.req("SYNC-01", "SYNC-02")
@pytest.mark.parametrize(
    ("dtypes", "gathered"),
    [(("bfloat16", "bfloat16"), "bfloat16"), (("bfloat16", "float16"), "float32")],
)
def test_shards_are_gathered_in_the_type_of_all_servers_or_in_float32(
    dtypes: tuple[DtypeName, DtypeName], gathered: DtypeName
) -> None:
    found: list[DtypeName] = []
    with scripted_rollouts([1, 1]) as rollouts:
        for one, dtype in zip(rollouts, dtypes, strict=True):
            one.dtype = dtype
        with fleet_of(rollouts, 4, gather=found.append):
            assert found == [gathered]


@pytest.mark.req("SYNC-07")
def test_checks_of_servers_beside_training_take_a_sixth_of_the_time() -> None:
    with fleet(1) as run:
        one = starting(run, seconds=1.0)
        one.starting_looks, looks = 1, one.server
        before, began = len(looks.bodies("GET /health/")), run.clock.now
        while run.clock.now < began + 21.0:
            run.backend.repush_restarted()
            run.clock.now += 0.25
        assert len(looks.bodies("GET /health/")) - before == 3


# --- Faults of any kind ------------------------------------------------------------------


FAULTS: list[Fault] = [
    *(S.ok, S.hang_up, S.hang_up_half_way, S.not_ready, S.gateway, S.too_many),
    *(S.lose_a_replica, S.lose_the_only_replica, S.restart, S.break_a_push, S.fall_asleep, S.die),
]


@pytest.fixture(scope="module")
def three_servers() -> Iterator[list[ScriptedRollouts]]:
    with scripted_rollouts([1, 2, 1]) as rollouts:
        yield rollouts


@pytest.mark.req("DIST-01", "DIST-03", "DIST-05", "SEED-01", "SYNC-07", "SYNC-09")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(0, 24),
    decode_batch_size=st.integers(1, 6),
    faults=st.lists(st.lists(st.sampled_from(FAULTS), max_size=6), min_size=3, max_size=3),
    rounds=st.integers(1, 2),
)
def test_every_request_is_answered_once_in_order_with_its_seed_while_one_server_lives(
    three_servers: list[ScriptedRollouts],
    count: int,
    decode_batch_size: int,
    faults: list[list[Fault]],
    rounds: int,
) -> None:
    running = [S(one.server, one.world_size) for one in three_servers]
    with fleet_of(running, decode_batch_size) as run:
        for one, planned in zip(running, faults, strict=True):
            one.faults.extend(planned)
        running[2].faults = deque(fault for fault in faults[2] if fault is not S.die)
        for version in range(1, rounds + 1):
            if version > 1:
                run.backend.push_weights(version)
            run.ask(count, version)
        for one in running:
            assert one.peak <= decode_batch_size * one.world_size


@pytest.mark.req("ASYNC-01", "DIST-05")
def test_close_gives_up_running_calls() -> None:
    started, finished = threading.Event(), threading.Event()

    def wait(one: ScriptedRollouts, call: InferCall) -> Reply:
        started.set()
        assert finished.wait(_LIMIT_S)
        return one.ok(call)

    with fleet(1) as run, ThreadPoolExecutor(1) as beside:
        run.rollouts[0].faults.append(wait)
        asking = beside.submit(run.ask, 3)
        assert started.wait(_LIMIT_S)
        run.backend.close()
        try:
            assert isinstance(asking.exception(timeout=_LIMIT_S), RunError)
        finally:
            finished.set()
    assert (run.rollouts[0].faults, run.notes()[0]) == (deque(), []), "it is not lost"
    assert run.rollouts[0].answered in ([], [[0, 1, 2]]), "it got no second call"
