"""Servers that fail, are lost and come back: nothing is lost, and nothing waits for ever."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.rollout.client import OtherWeights, RolloutClient
from learner.rollout.handout import FRUITLESS_RETURNS, Handout, Job
from learner.rollout.journal import Journal
from learner.rollout.member import ATTEMPTS, Part, ServerLost
from learner.rollout.pushed_member import PushedMember
from learner.rollout.requests import build_request
from learner.rollout.server import ServerBackend
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall, RequestConfig, RolloutInferRequest
from shared_contracts.server_info import Info
from tests.unit.scripted_rollouts import (
    INFER,
    Fault,
    ScriptedChannel,
    ScriptedRollouts,
    bodies,
)
from tests.unit.scripted_server import Reply, Route, envelope, problem, scripted_server

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


# --- Retries at the same server ---------------------------------------------------------


@pytest.mark.req("DIST-05")
@pytest.mark.parametrize("fault", [S.hang_up, S.hang_up_half_way, S.not_ready, S.gateway])
def test_a_passing_fault_is_retried_at_the_same_server_as_the_same_call(fault: Fault) -> None:
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
def test_pauses_grow_and_are_as_long_as_a_busy_server_asks() -> None:
    with fleet(1) as run:
        run.rollouts[0].faults.extend([S.not_ready, S.not_ready, S.too_many])
        run.ask(2)
    assert len(run.pauses) == ATTEMPTS - 1
    first, second, asked = run.pauses
    assert 0.5 <= first <= 0.75
    assert 1.0 <= second <= 1.5
    assert asked >= 3


@pytest.mark.req("DIST-05", "WIRE-05")
@pytest.mark.parametrize("kind", ["invalid-request", "bad-request", "body-too-large"])
def test_what_is_wrong_with_a_request_ends_the_run_at_once(kind: str) -> None:
    with fleet(2) as run:
        run.rollouts[0].server.routes[INFER] = lambda _: problem(kind, "too long", "messages")
        with pytest.raises(ProblemError, match="too long"):
            run.ask(4)
        assert len(bodies(run.rollouts[0].server)) == 1
        assert run.pauses == []


@pytest.mark.req("DIST-05", "WIRE-05")
def test_once_the_run_has_ended_no_server_is_asked_again() -> None:
    """One server answers nothing until the other has refused; then it fails, and is let be."""
    with fleet(2) as run:
        refused, again = threading.Event(), threading.Event()

        def fail_late(one: ScriptedRollouts, call: InferCall) -> Reply:
            assert refused.wait(20)
            return one.not_ready(call)

        def note(one: ScriptedRollouts, call: InferCall) -> Reply:
            again.set()
            return one.ok(call)

        def refuse(body: object) -> Reply:
            return problem("invalid-request", "too long", "messages")

        slow = run.rollouts[0]
        slow.faults.extend([fail_late, note])
        run.rollouts[1].server.routes[INFER] = refuse
        with pytest.raises(ProblemError, match="too long"):
            run.ask(4)
        refused.set()
        assert not again.wait(0.5)
        assert run.pauses == []


@pytest.mark.req("DIST-05")
def test_a_call_that_was_given_up_ends_while_the_server_still_generates() -> None:
    with scripted_server() as server:
        rollouts, let_go, given_up = S(server), threading.Event(), threading.Event()

        def generate(one: ScriptedRollouts, call: InferCall) -> Reply:
            given_up.set()
            assert let_go.wait(60)
            return one.ok(call)

        rollouts.faults.append(generate)
        call = Job(requests(1), RequestConfig(), version=None).call(range(1))
        with RolloutClient(server.base_url, live_interval_s=0.05) as client:
            member = PushedMember(client, ScriptedChannel(rollouts), Journal(), lambda _: None)
            with pytest.raises(ServerLost, match="given up") as caught:
                member.answer(call, Part(range(1)), given_up)
            with pytest.raises(ServerLost, match="given up"):
                member.answer(call, Part(range(1)), given_up)
            let_go.set()
        assert caught.value.tried == 1
        assert len(bodies(server)) == 1


@pytest.mark.req("DIST-05", "SRV-06")
def test_a_refused_token_ends_the_run_at_once() -> None:
    with fleet(2) as run:
        run.rollouts[0].server.routes[INFER] = lambda _: problem("unauthorized", "no", "header")
        with pytest.raises(ContractError, match="ROLLOUT_SERVER_TOKEN"):
            run.ask(4)


@pytest.mark.req("DIST-01", "WIRE-02")
def test_an_answer_of_the_wrong_length_ends_the_run() -> None:
    with fleet(1) as run:
        run.rollouts[0].server.routes[INFER] = lambda _: [envelope([0], [1])] * 3
        with pytest.raises(ProblemError, match="3 envelopes for 2 requests"):
            run.ask(2)


# --- A lost server among others ---------------------------------------------------------


@pytest.mark.req("DIST-05", "SEED-01")
def test_the_chunk_of_a_dead_server_is_split_over_the_healthy_ones() -> None:
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


@pytest.mark.req("SYNC-07", "DIST-05")
def test_a_lost_server_is_looked_at_once_before_every_rollout_and_push() -> None:
    with fleet(2) as run:
        run.rollouts[0].faults.append(S.die)
        run.ask(4)
        run.ask(4)
        run.backend.push_weights(2)
        run.ask(4, version=2)
        looks = run.rollouts[0].server.bodies("GET /health/")
        assert len(looks) == 3
        assert len(bodies(run.rollouts[0].server)) == ATTEMPTS
    assert run.pushed() == [[1], [1, 2]]


@pytest.mark.req("SYNC-07")
def test_a_server_that_was_started_anew_gets_the_same_weights_before_it_is_asked() -> None:
    with fleet(2) as run:
        run.rollouts[0].faults.append(S.restart)
        run.ask(4)
        assert run.pushed() == [[1], [1]]
        run.ask(4)
        assert run.pushed() == [[1, 1], [1]]
        assert [channel.groups for channel in run.channels] == [2, 1]
        _, metrics = run.notes()
    assert (metrics["sync/repushes"], metrics["sync/pushes"]) == (1, 1)
    assert run.rollouts[0].answered == [[0, 1]]


@pytest.mark.req("SYNC-07")
def test_the_next_push_takes_a_server_back() -> None:
    with fleet(2) as run:
        run.rollouts[0].faults.append(S.restart)
        run.ask(4)
        run.backend.push_weights(2)
        run.ask(4, version=2)
    assert run.pushed() == [[1, 2], [1, 2]]


@pytest.mark.req("SYNC-07")
def test_an_answer_of_another_epoch_is_taken_and_the_server_pushed_to_before_the_next() -> None:
    with fleet(1, decode_batch_size=2) as run:
        run.rollouts[0].faults.append(S.lose_a_replica)
        run.ask(6)
    assert run.pushed() == [[1, 1]]
    assert run.rollouts[0].answered == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.req("SYNC-07")
@pytest.mark.parametrize("fault", [S.restart, S.poison, S.lose_the_only_replica])
def test_a_server_without_the_weights_is_pushed_to_again_and_nobody_else(fault: Fault) -> None:
    with fleet(2) as run:
        run.rollouts[1].faults.append(fault)
        run.ask(4)
        run.ask(4)
    assert run.pushed() == [[1], [1, 1]]


@pytest.mark.req("SYNC-07", "WIRE-03")
def test_another_learner_at_the_same_server_ends_the_run() -> None:
    with fleet(2) as run:
        run.rollouts[0].version = 8
        with pytest.raises(OtherWeights, match="another learner"):
            run.ask(4)
    assert run.pushed() == [[1], [1]]


@pytest.mark.req("WIRE-03", "SYNC-09")
def test_an_answer_of_other_weights_is_not_taken() -> None:
    with fleet(1) as run:

        def stale(body: object) -> Reply:
            return [envelope([0], [1]).model_copy(update={"coordexp": stamp})]

        stamp = envelope([0], [1]).coordexp.model_copy(
            update={"weights_version": (0, 1), "server_epoch": run.rollouts[0].epoch}
        )
        run.rollouts[0].server.routes[INFER] = stale
        with pytest.raises(OtherWeights, match=r"version 1 is expected, and \[0, 1\] answered"):
            run.ask(1)


# --- No server is left ------------------------------------------------------------------


@pytest.mark.req("SYNC-07", "DIST-05")
@pytest.mark.parametrize("fault", [S.restart, S.poison, S.lose_the_only_replica])
def test_the_only_server_is_waited_for_and_pushed_to(fault: Fault) -> None:
    with fleet(1, decode_batch_size=2) as run:
        run.rollouts[0].faults.extend([S.ok, fault])
        run.ask(6)
        _, metrics = run.notes()
    assert run.pushed() == [[1, 1]]
    assert run.rollouts[0].answered == [[0, 1], [2, 3], [4, 5]]
    assert metrics["rollout/splits"] == 0


@pytest.mark.req("DIST-05")
def test_a_server_that_only_was_out_of_reach_needs_no_push() -> None:
    with fleet(1) as run:
        run.rollouts[0].faults.extend([S.hang_up] * ATTEMPTS)
        run.ask(2)
        calls = bodies(run.rollouts[0].server)
    assert run.pushed() == [[1]]
    assert len({call.request_id for call in calls}) == 1


@pytest.mark.req("SYNC-07", "SYNC-04")
def test_a_server_that_stays_away_ends_the_run_with_what_was_waited_for() -> None:
    with fleet(1, timeout_s=0.2) as run:
        run.rollouts[0].faults.append(S.die)
        with pytest.raises(RunError) as caught:
            run.ask(2)
    url = run.rollouts[0].server.base_url
    assert f"{url}: GET {url}/health/" in str(caught.value)
    assert "waited 0 s (rollout_matching.vllm.server.timeout_s)" in str(caught.value)


@pytest.mark.req("SYNC-07", "DIST-05")
@pytest.mark.parametrize("at", ["rollout", "push"])
def test_a_server_that_says_that_it_is_starting_is_waited_for_longer(at: str) -> None:
    with fleet(1, timeout_s=0.2) as run:
        one = run.rollouts[0]
        one.server.routes["GET /health/"] = slowly(one.server.routes["GET /health/"])
        one.starting_looks = 5
        if at == "rollout":
            one.faults.append(S.lose_the_only_replica)
            run.ask(2)
            assert run.pushed() == [[1, 1]]
        else:
            one.start_anew()
            run.backend.push_weights(2)
            assert run.pushed() == [[1, 2]]
        assert one.starting_looks == 0


def slowly(route: Route) -> Route:
    """Each answer takes half of the time that a silent server is waited for."""

    def answer(body: object) -> Reply:
        time.sleep(0.1)
        return route(body)

    return answer


@pytest.mark.req("SYNC-07")
def test_a_server_that_never_ends_to_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.rollout.patience.LONGEST_WAIT_S", 0.5)
    with fleet(1, timeout_s=0.2) as run:
        run.rollouts[0].starting_looks = 10**9
        run.rollouts[0].faults.append(S.lose_the_only_replica)
        with pytest.raises(RunError, match=r"whatever it says.*replica 0 is starting"):
            run.ask(2)


@pytest.mark.req("SYNC-07", "REP-06")
def test_a_server_that_comes_back_as_another_one_is_not_pushed_to() -> None:
    with fleet(2, timeout_s=0.2) as run:
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
@pytest.mark.parametrize(("rest_s", "tries"), [(600.0, 1), (0.0, 4)])
def test_a_server_whose_group_cannot_be_formed_is_left_alone_for_a_while(
    rest_s: float, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.rollout.pushed_member.FIRST_REST_S", rest_s)
    with fleet(2) as run:
        run.rollouts[0].faults.append(S.restart)
        run.ask(4)
        blocked, before = run.channels[0], run.channels[0].tries
        blocked.blocked = True
        run.ask(4)
        run.ask(4)
        run.backend.push_weights(2)
        run.ask(4, version=2)
        assert blocked.tries - before == tries
        lost, metrics = run.notes()
    assert [url for url, _ in lost] == [run.rollouts[0].server.base_url]
    assert metrics["rollout/servers_lost"] == 1


@pytest.mark.req("SYNC-07")
def test_a_server_that_rests_is_tried_when_no_other_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.rollout.pushed_member.FIRST_REST_S", 600.0)
    with fleet(2) as run:
        run.rollouts[0].faults.append(S.restart)
        run.ask(4)
        run.channels[0].blocked = True
        run.ask(4)
        run.channels[0].blocked = False
        run.rollouts[1].faults.append(S.die)
        run.ask(4)
    assert run.pushed() == [[1, 1], [1]]


@pytest.mark.req("DIST-05")
def test_a_server_that_comes_back_only_to_fail_again_ends_the_run() -> None:
    with fleet(1, timeout_s=0.2) as run:
        run.rollouts[0].server.routes[INFER] = lambda _: problem("too-many-calls", "busy", INFER)
        with pytest.raises(RunError, match="though some came back"):
            run.ask(2)
    assert run.pushed() == [[1]]


@pytest.mark.req("DIST-05")
@pytest.mark.parametrize(("answers_between", "ends"), [(1, False), (0, True)])
def test_only_returns_without_an_answer_between_them_are_in_vain(
    answers_between: int, ends: bool
) -> None:
    with scripted_server() as server, RolloutClient(server.base_url) as client:
        rollouts, journal = S(server), Journal()
        times_lost = FRUITLESS_RETURNS + 2
        rollouts.faults.extend(([S.hang_up] * ATTEMPTS + [S.ok] * answers_between) * times_lost)
        member = PushedMember(client, ScriptedChannel(rollouts), journal, lambda _: None)
        handout = Handout(
            Job(requests(times_lost), RequestConfig(), version=None),
            [member],
            caps=lambda world_sizes: [1] * len(world_sizes),
            journal=journal,
            wait_for_one=lambda: member.take_back(None),
            patience_s=0.0,
        )
        if ends:
            with pytest.raises(RunError, match=f"came back {FRUITLESS_RETURNS} times"):
                handout.run()
        else:
            assert len(handout.run()) == times_lost


@pytest.mark.req("SYNC-07")
def test_the_first_server_to_come_back_does_all_the_work() -> None:
    with fleet(2) as run:
        run.rollouts[0].faults.append(S.die)
        run.rollouts[1].faults.append(S.restart)
        run.ask(4)
        assert run.rollouts[0].answered == []
        assert sorted(n for call in run.rollouts[1].answered for n in call) == [0, 1, 2, 3]
    assert run.pushed() == [[1], [1, 1]]


# --- Pushes that break ------------------------------------------------------------------


@pytest.mark.req("SYNC-07", "SYNC-09")
def test_a_push_that_breaks_at_one_server_leaves_it_out_until_it_has_the_weights() -> None:
    with fleet(2) as run:
        run.channels[0].failures.append(RunError("the transfer broke"))
        run.backend.push_weights(2)
        assert run.pushed() == [[1], [1, 2]]
        run.ask(4, version=2)
        lost, metrics = run.notes()
    assert run.pushed() == [[1, 2], [1, 2]]
    assert lost == [(run.rollouts[0].server.base_url, "the transfer broke")]
    assert (metrics["sync/pushes"], metrics["sync/repushes"]) == (2, 1)


@pytest.mark.req("SYNC-07")
def test_a_push_that_breaks_everywhere_is_tried_once_more() -> None:
    with fleet(1) as run:
        run.channels[0].failures.append(RunError("the transfer broke"))
        run.backend.push_weights(2)
        run.ask(2, version=2)
        assert run.channels[0].groups == 2
        run.channels[0].failures.extend([RunError("broken"), RunError("broken again")])
        with pytest.raises(RunError, match="broken again"):
            run.backend.push_weights(3)


@pytest.mark.req("SYNC-07")
def test_a_server_that_was_started_anew_between_steps_takes_the_push() -> None:
    with fleet(1) as run:
        run.rollouts[0].start_anew()
        run.backend.push_weights(2)
        run.ask(2, version=2)
    assert run.pushed() == [[1, 2]]


@pytest.mark.req("SYNC-07")
def test_a_push_whose_answer_was_lost_is_not_made_again() -> None:
    with fleet(1) as run:
        run.channels[0].answer_lost = True
        run.backend.push_weights(2)
        run.ask(2, version=2)
    assert run.pushed() == [[1, 2]]


@pytest.mark.req("SYNC-06", "SYNC-07")
def test_weights_that_were_not_verified_are_not_taken_for_the_servers_word() -> None:
    with fleet(2) as run:
        run.channels[0].disbelieved = True
        run.backend.push_weights(2)
        run.ask(4, version=2)
        run.ask(4, version=2)
        assert run.rollouts[0].answered == []
        assert run.rollouts[0].version == 2


@pytest.mark.req("SYNC-07")
def test_a_replica_lost_at_the_end_of_a_push_has_it_made_again() -> None:
    with fleet(1) as run:
        run.channels[0].loses_a_replica = True
        run.backend.push_weights(2)
    assert run.pushed() == [[1, 2, 2]]


@pytest.mark.req("SYNC-01", "SYNC-07")
def test_a_push_may_form_the_group_anew_itself() -> None:
    """As it does where full weights take the place of a broken adapter."""
    with fleet(1) as run:
        run.rollouts[0].losses, run.rollouts[0].stale = 1, True
        run.channels[0].forms_anew = True
        run.backend.push_weights(2)
        run.ask(2, version=2)
    assert run.pushed() == [[1, 2]]
    assert run.notes()[0] == []


@pytest.mark.req("SYNC-05", "SYNC-07")
def test_a_push_that_a_server_will_never_take_ends_the_run_at_once() -> None:
    with fleet(2) as run:
        refused = RunError("refused")
        refused.__cause__ = ProblemError(Problem.of("manifest-mismatch", "no such name", "m"))
        run.channels[0].failures.append(refused)
        with pytest.raises(RunError, match="refused"):
            run.backend.push_weights(2)


# --- Whatever happens -------------------------------------------------------------------


FAULTS: list[Fault] = [
    S.ok,
    S.hang_up,
    S.hang_up_half_way,
    S.not_ready,
    S.gateway,
    S.too_many,
    S.lose_a_replica,
    S.lose_the_only_replica,
    S.restart,
    S.poison,
    S.die,
]


@pytest.fixture(scope="module")
def three_servers() -> Iterator[list[ScriptedRollouts]]:
    with ExitStack() as stack:
        yield [S(stack.enter_context(scripted_server()), size) for size in (1, 2, 1)]


@pytest.mark.req("DIST-01", "DIST-03", "DIST-05", "SEED-01", "SYNC-07", "SYNC-09")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
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
    with fleet_of(running, decode_batch_size, timeout_s=20.0) as run:
        for one, planned in zip(running, faults, strict=True):
            one.faults.extend(planned)
        running[2].faults = deque(fault for fault in faults[2] if fault is not S.die)
        for version in range(1, rounds + 1):
            if version > 1:
                run.backend.push_weights(version)
            run.ask(count, version)
        for one in running:
            assert one.peak <= decode_batch_size * one.world_size


@pytest.mark.req("SEED-02")
@given(faults=st.lists(st.sampled_from(FAULTS[:6]), max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
def test_rollouts_are_the_same_whatever_failed_meanwhile(
    three_servers: list[ScriptedRollouts], faults: list[Fault]
) -> None:
    running = [S(one.server, one.world_size) for one in three_servers]
    with fleet_of(running, decode_batch_size=2, timeout_s=20.0) as run:
        undisturbed = run.ask(11)
        running[0].faults.extend(faults)
        assert run.ask(11) == undisturbed
    anew = S(three_servers[0].server, three_servers[0].world_size)
    with fleet_of([anew], decode_batch_size=3, timeout_s=20.0) as run:
        assert run.ask(11) == undisturbed


@pytest.mark.req("DIST-03")
def test_no_server_waits_for_another() -> None:
    """The first server's call ends only when the second has answered all of its slices."""
    with fleet(2, decode_batch_size=2) as run:
        slow, fast = run.rollouts
        finished = threading.Event()

        def wait(one: ScriptedRollouts, call: InferCall) -> Reply:
            assert finished.wait(20)
            return one.ok(call)

        def count(one: ScriptedRollouts, call: InferCall) -> Reply:
            reply = one.ok(call)
            if len(one.answered) == 3:
                finished.set()
            return reply

        slow.faults.append(wait)
        fast.faults.extend([count] * 3)
        run.ask(12)
    assert [len(call) for call in fast.answered] == [2, 2, 2]
