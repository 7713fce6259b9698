"""Calls that fail at a server that may answer later: what is asked again, and what ends the run."""

import threading

import pytest

from learner.rollout.backend import Journal
from learner.rollout.client import RolloutClient
from learner.rollout.dispatch import Job
from learner.rollout.server import LeaderHandle
from learner.rollout.server_handle import ATTEMPTS, Part, ServerLost
from shared_contracts.errors import ContractError, Problem, ProblemError
from shared_contracts.infer import InferCall, RequestConfig
from tests.unit.fleets import S, fleet, requests
from tests.unit.scripted_rollouts import INFER, Fault, ScriptedChannel, ScriptedRollouts, bodies
from tests.unit.scripted_server import Reply, envelope, problem, scripted_server


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


@pytest.mark.req("WIRE-05")
def test_a_refused_request_is_named_by_the_line_of_its_sample() -> None:
    """As an image that has become unreadable in the middle of a run."""

    def refuse(body: object) -> Reply:
        where = "infer_requests[1].images[0]"
        errors = [{"index": 1, "where": where, "detail": "the image cannot be read"}]
        kind, detail = "invalid-request", "1 bad request(s), nothing is answered; the first: ..."
        refused = Problem.of(kind, detail, where, errors)
        return refused.status, refused

    with fleet(1) as run:
        run.rollouts[0].server.routes[INFER] = refuse
        with pytest.raises(ProblemError) as caught:
            run.ask(2)
        uuid = bodies(run.rollouts[0].server)[0].infer_requests[1].uuid
    assert str(caught.value).endswith(f"the first: ...; of {uuid}")


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
            member = LeaderHandle(client, ScriptedChannel(rollouts), Journal(), lambda _: None)
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
