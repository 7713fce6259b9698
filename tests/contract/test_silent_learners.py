"""A learner that is silent, or whose place another takes: its phase is broken, and in time."""

import asyncio
import time

import pytest

from rollout_server.runtime.concurrency import Silence
from rollout_server.weights.weight_updates import WeightUpdates
from shared_contracts.errors import ProblemError
from shared_contracts.weights import (
    AdapterBase,
    StartWeightUpdate,
    SyncReport,
    UpdateWeights,
)
from tests.contract.update_bench import DIGEST, PARAMETER, Bench, Hang, run

GONE_AFTER_S = 1.5
# The phase in which an engine hangs, and what the server is afterwards.
HELD = [
    ("pause", "READY"),
    ("open_weight_update", "POISONED"),
    ("receive_weights", "POISONED"),
    ("complete_load", "POISONED"),
    ("read_back", "POISONED"),
]


async def begun(bench: Bench, phase: str) -> "asyncio.Task[SyncReport]":
    """A push of version 1 whose `phase` hangs, when it is there."""
    bench.engines[0].script[phase] = Hang()
    pushing = asyncio.ensure_future(bench.push(1))
    while phase not in bench.engines[0].calls:
        await asyncio.sleep(0)
    return pushing


def assert_old_weights_serve(bench: Bench, state: str) -> None:
    """Or none: a full push is needed then, which works."""
    assert (bench.state, bench.updates.version) == (state, 0)
    resumed = [engine.calls[-1] == "resume" for engine in bench.engines]
    assert resumed == [state == "READY"] * 2


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize(("phase", "state"), HELD)
def test_a_phase_of_a_silent_learner_is_broken(phase: str, state: str) -> None:
    async def work() -> None:
        bench = Bench(gone_after_s=GONE_AFTER_S)
        await bench.init(timeout_s=60.0)
        pushing = await begun(bench, phase)
        with pytest.raises(ProblemError, match=r"no heartbeat for 1\.5 s") as caught:
            await pushing
        assert caught.value.problem.status == 502
        assert " at 127.0.0.1:" in caught.value.problem.where
        assert_old_weights_serve(bench, state)
        bench.engines[0].script.clear()
        await bench.init()
        await bench.push(1)
        assert (bench.state, bench.updates.version) == ("READY", 1)

    run(work())


@pytest.mark.req("SYNC-04")
def test_a_group_whose_learner_is_silent_does_not_form_and_the_engines_serve() -> None:
    async def work() -> None:
        bench = Bench(gone_after_s=GONE_AFTER_S)
        joining = bench.engines[0].script["join_group"] = Hang()
        with pytest.raises(ProblemError, match="no heartbeat"):
            await bench.init(timeout_s=60.0)
        await asyncio.sleep(0)
        assert joining.given_up
        assert (bench.state, bench.updates.group.formed) == ("READY", None)
        del bench.engines[0].script["join_group"]
        await bench.init()

    run(work())


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize("trial", [False, True])
def test_silence_between_two_calls_of_an_update_ends_it(trial: bool) -> None:
    async def work() -> None:
        bench = Bench(gone_after_s=GONE_AFTER_S)
        await bench.init(timeout_s=60.0, attempt="a", if_none=trial)
        base = AdapterBase(parameters=[PARAMETER], digests=[DIGEST]) if trial else None
        version = 0 if trial else 1
        await bench.updates.start(
            StartWeightUpdate(
                version=version, parameters=[PARAMETER], base=base, trial=trial, attempt=None
            )
        )
        ready = asyncio.ensure_future(bench.updates.wait_until_ready())
        if trial:
            await ready
        else:
            with pytest.raises(ProblemError, match="full push"):
                await ready
        assert bench.state == ("READY" if trial else "POISONED")

    run(work())


@pytest.mark.req("SYNC-04")
def test_a_worker_that_a_silent_guest_keeps_in_a_trial_is_not_waited_for() -> None:
    """It waits in a collective, which nothing can interrupt."""

    async def work() -> None:
        bench = Bench(gone_after_s=GONE_AFTER_S)
        await bench.init(timeout_s=60.0, attempt="guest", if_none=True)
        base = AdapterBase(parameters=[PARAMETER], digests=[DIGEST])
        await bench.updates.start(
            StartWeightUpdate(
                version=0, parameters=[PARAMETER], base=base, trial=True, attempt=None
            )
        )
        undone = Hang()
        bench.engines[0].script |= {"receive_weights": Hang(), "abandon_trial": undone}
        with pytest.raises(ProblemError, match="not done within"):
            await bench.updates.receive(UpdateWeights(version=0, attempt=None))
        assert undone.given_up
        assert bench.state == "POISONED"

    run(work())


@pytest.mark.req("SYNC-04", "SRV-05")
@pytest.mark.parametrize("phase", ["join_group", "receive_weights"])
def test_an_engine_whose_worker_is_held_by_a_silent_learner_is_built_again(phase: str) -> None:
    """Else it would be held for as long as that learner said, and the next learner with it."""

    async def work() -> None:
        bench = Bench(gone_after_s=GONE_AFTER_S)
        bench.engines[0].script |= {phase: Hang(), "leave_group": Hang()}

        async def push() -> None:
            await bench.init(timeout_s=60.0)
            await bench.push(1)

        with pytest.raises(ProblemError, match="no heartbeat"):
            await push()
        assert [engine.given_up for engine in bench.engines] == [True, False]

    run(work())


@pytest.mark.req("SYNC-04", "SYNC-07")
@pytest.mark.parametrize("phase", ["join_group", "receive_weights"])
def test_a_learner_that_says_it_lives_has_all_its_time(phase: str) -> None:
    """While its group forms, too; and time in which the server stood still does not count.

    A second is long enough for a machine that is busy with other tests.
    """
    gone_after_s = 1.0

    async def work() -> None:
        bench = Bench(gone_after_s=gone_after_s)

        async def slow() -> None:
            for _ in range(6):
                await asyncio.sleep(gone_after_s / 4)
                bench.updates.heartbeat("first")
            time.sleep(2 * gone_after_s)  # no call of a learner is heard meanwhile
            await asyncio.sleep(gone_after_s / 16)

        bench.engines[0].script[phase] = slow
        await bench.init(attempt="first", timeout_s=60.0)
        await bench.push(1)
        assert (bench.state, bench.updates.version) == ("READY", 1)

    run(work())


@pytest.mark.req("SYNC-04", "SYNC-07")
@pytest.mark.parametrize(("phase", "state"), HELD)
@pytest.mark.parametrize("by", ["init", "close"])
def test_a_phase_that_runs_is_broken_by_a_new_group_and_by_the_end_of_its_own(
    phase: str, state: str, by: str
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(attempt="first", timeout_s=60.0)
        pushing = await begun(bench, phase)
        await bench.updates.close_communicator("another")
        with pytest.raises(ProblemError, match="another learner's phase runs"):
            await bench.init(attempt="guest", if_none=True)
        await asyncio.sleep(0.05)
        assert not pushing.done()
        if by == "init":
            await bench.init(attempt="second")
        else:
            await bench.updates.close_communicator("first")
        with pytest.raises(ProblemError, match="requested" if by == "init" else "was closed"):
            await pushing
        assert bench.state == state
        bench.engines[0].script.clear()
        await bench.init()
        await bench.push(1)

    run(work())


@pytest.mark.req("SYNC-04", "SYNC-07")
@pytest.mark.parametrize("by", ["init", "close"])
def test_a_group_that_forms_is_broken_by_a_new_one_and_closed_by_its_attempt(by: str) -> None:
    async def work() -> None:
        bench = Bench()
        bench.engines[0].script["join_group"] = Hang()
        forming = asyncio.ensure_future(bench.init(attempt="first", timeout_s=60.0))
        while not bench.engines[0].calls:
            await asyncio.sleep(0)
        bench.engines[0].script.clear()
        if by == "init":
            await bench.init(attempt="second")
        else:
            await bench.updates.close_communicator("first")
        with pytest.raises(ProblemError, match="requested" if by == "init" else "was closed"):
            await forming
        assert (bench.updates.group.formed is not None) == (by == "init")

    run(work())


def told(updates: WeightUpdates) -> tuple[str | None, str] | None:
    call = updates.call
    if call is None:
        return None
    assert 0 <= call.heard_s <= call.running_s + 0.1
    return call.route, call.attempt


@pytest.mark.req("WIRE-06", "SYNC-04")
def test_the_server_says_which_call_of_which_attempt_it_waits_for() -> None:
    async def work() -> None:
        bench = Bench()
        seen = []

        async def note() -> None:
            seen.append(told(bench.updates))

        for phase in ("join_group", "pause", "receive_weights", "complete_load"):
            bench.engines[0].script[phase] = note
        assert told(bench.updates) is None
        await bench.init(attempt="first")
        assert told(bench.updates) is None
        await bench.start(1)
        assert told(bench.updates) == (None, "first")
        await bench.updates.receive(UpdateWeights(version=1, attempt=None))
        await bench.updates.close_communicator("first")
        assert told(bench.updates) is None
        await bench.init(attempt="second")
        await bench.push(1)
        assert told(bench.updates) is None
        routes = ("/init_communicator/", "/start_weight_update/", "/update_weights/")
        assert seen == [
            *((route, "first") for route in routes),
            *((route, "second") for route in (*routes, "/finish_weight_update/")),
        ]

    run(work())


def test_a_guest_is_heard_by_the_server_and_keeps_nobody_away() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(attempt="guest", if_none=True)
        bench.updates.heartbeat("guest")
        assert bench.updates.group.heard_s is None
        assert bench.updates.group.silent_s < 5

    run(work())


def test_silence_does_not_grow_while_nobody_looks() -> None:
    silence = Silence(look_s=0.01)
    time.sleep(0.2)
    assert silence.looked(age_s=0.2) == 0.02
    assert silence.looked(age_s=0.001) == 0.001
