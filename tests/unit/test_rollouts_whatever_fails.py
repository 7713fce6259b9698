"""Rollouts under faults of any kind: all answered once, in order, the same, and nobody waits."""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared_contracts.errors import RunError
from shared_contracts.infer import InferCall
from tests.unit.fleets import S, fleet, fleet_of
from tests.unit.scripted_rollouts import Fault, ScriptedRollouts
from tests.unit.scripted_server import Reply, scripted_server

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


@pytest.mark.req("ASYNC-01", "DIST-05")
def test_a_backend_that_closes_gives_up_what_is_being_asked() -> None:
    asked, finished = threading.Event(), threading.Event()

    def wait(one: ScriptedRollouts, call: InferCall) -> Reply:
        asked.set()
        assert finished.wait(20)
        return one.ok(call)

    with fleet(1) as run, ThreadPoolExecutor(1) as beside:
        run.rollouts[0].faults.append(wait)
        asking = beside.submit(run.ask, 3)
        assert asked.wait(20)
        run.backend.close()
        try:
            assert isinstance(asking.exception(timeout=60), RunError)
        finally:
            finished.set()
    assert len(run.rollouts[0].faults) == 0
    assert run.rollouts[0].answered in ([], [[0, 1, 2]]), "it was not asked again"


@pytest.mark.req("DIST-03")
def test_no_server_waits_for_another() -> None:
    """The first server's calls end only when the second has answered all of its own."""
    with fleet(2, decode_batch_size=2) as run:
        slow, fast = run.rollouts
        finished = threading.Event()

        def wait(one: ScriptedRollouts, call: InferCall) -> Reply:
            assert finished.wait(20)
            return one.ok(call)

        def count(one: ScriptedRollouts, call: InferCall) -> Reply:
            reply = one.ok(call)
            if len(one.answered) == 6:
                finished.set()
            return reply

        slow.faults.extend([wait] * 2)
        fast.faults.extend([count] * 6)
        run.ask(12)
    assert sorted(fast.answered) == [[number] for number in range(6, 12)]


@pytest.mark.req("DIST-03", "FULL-06")
def test_no_request_waits_for_the_slowest_answer_of_those_before_it() -> None:
    """The first call ends only when all other requests are answered: its places alone are kept."""
    with fleet(1, decode_batch_size=16) as run:
        (one,) = run.rollouts
        others = threading.Event()

        def slowest(one: ScriptedRollouts, call: InferCall) -> Reply:
            assert others.wait(20)
            return one.ok(call)

        def count(one: ScriptedRollouts, call: InferCall) -> Reply:
            reply = one.ok(call)
            if sum(len(numbers) for numbers in one.answered) == 64 - 1:
                others.set()
            return reply

        one.faults.extend([slowest, *[count] * 63])
        run.ask(64)
        assert one.peak <= 16
    assert sorted(one.answered) == [[number] for number in range(64)]
