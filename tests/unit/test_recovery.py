"""Servers that fail, are lost and come back: nothing is lost, and nothing waits for ever."""

import re
import time

import pytest

from learner.rollout.backend import Journal
from learner.rollout.client import OtherWeights, RolloutClient
from learner.rollout.dispatch import FRUITLESS_RETURNS, Dispatch, Job
from learner.rollout.server import LeaderHandle
from learner.rollout.server_handle import ATTEMPTS
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import RequestConfig
from tests.unit.fleets import S, fleet, requests
from tests.unit.scripted_rollouts import INFER, Fault, ScriptedChannel, bodies
from tests.unit.scripted_server import Reply, Route, envelope, problem, scripted_server

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
    assert sorted(run.rollouts[0].answered) == [[number] for number in range(6)]


@pytest.mark.req("SYNC-07")
@pytest.mark.parametrize("fault", [S.restart, S.poison, S.lose_the_only_replica])
def test_a_server_without_the_weights_is_pushed_to_again_and_nobody_else(fault: Fault) -> None:
    with fleet(2) as run:
        run.rollouts[1].faults.append(fault)
        run.ask(4)
        run.ask(4)
    assert run.pushed() == [[1], [1, 1]]


@pytest.mark.req("SYNC-07")
def test_a_lost_server_that_another_learner_has_taken_ends_the_run() -> None:
    with fleet(2) as run:
        run.rollouts[0].faults.append(S.lose_the_only_replica)
        run.ask(4)
        run.channels[0].taken = ContractError(
            "weight_group", "another learner pushes to this server", "End it"
        )
        with pytest.raises(ContractError, match="another learner pushes"):
            run.ask(4)
    assert run.pushed() == [[1], [1]]


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
    assert sorted(run.rollouts[0].answered) == [[number] for number in range(6)]
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
    assert re.search(
        r"waited \d s \(rollout_matching\.vllm\.server\.timeout_s\)", str(caught.value)
    )


@pytest.mark.req("SYNC-07", "DIST-05")
@pytest.mark.parametrize("at", ["rollout", "push"])
def test_a_server_that_says_that_it_is_starting_is_waited_for_longer(at: str) -> None:
    with fleet(1, timeout_s=1.0) as run:
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
        time.sleep(0.5)
        return route(body)

    return answer


@pytest.mark.req("SYNC-07")
def test_a_server_that_never_ends_to_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.rollout.server.LONGEST_WAIT_S", 0.5)
    with fleet(1, timeout_s=0.2) as run:
        run.rollouts[0].starting_looks = 10**9
        run.rollouts[0].faults.append(S.lose_the_only_replica)
        with pytest.raises(RunError, match=r"the longest wait.*replica 0 is starting"):
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
    monkeypatch.setattr("learner.rollout.server.FIRST_REST_S", rest_s)
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
    monkeypatch.setattr("learner.rollout.server.FIRST_REST_S", 600.0)
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
        member = LeaderHandle(client, ScriptedChannel(rollouts), journal, lambda _: None)
        handout = Dispatch(
            Job(requests(times_lost), RequestConfig(), version=None),
            [member],
            caps=lambda world_sizes: [1] * len(world_sizes),
            journal=journal,
            look=lambda: None,
            wait_for_one=lambda: member.take_back(None),
            patience_s=0.0,
        )
        if ends:
            with pytest.raises(RunError, match=f"came back {FRUITLESS_RETURNS} times"):
                list(handout.chunks(times_lost))
        else:
            assert list(map(len, handout.chunks(times_lost))) == [times_lost]


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
