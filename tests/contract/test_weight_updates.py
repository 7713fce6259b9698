"""Weight updates and the weight group over scripted engines: phases, refusals, failures."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from pydantic import ValidationError

from rollout_server.engines.engine_protocol import EngineDead, WeightPhaseFailed
from rollout_server.engines.vllm.weight_engines import init_info, update_info
from shared_contracts.errors import ProblemError
from shared_contracts.weights import (
    MOST,
    MOST_VERSION_STEP,
    AdapterBase,
    AdapterMeta,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterDigest,
    StartWeightUpdate,
    UpdateWeights,
)
from tests.contract.update_bench import (
    DIGEST,
    FAULT,
    NCCL_ID,
    PARAMETER,
    Bench,
    Hang,
    answers,
    asynchronous,
    fails,
)

T = TypeVar("T")

BROKEN = WeightPhaseFailed("no")
# What a worker reads back when it does not hold what was sent.
OTHER = [[("m", 0, 0, 2, 1, 8)]]
DIFFERS = f"{7:016x} was sent, {8:016x} is held"
PHASES = ["open_weight_update", "receive_weights", "complete_load", "read_back"]


# --- phases and versions


@pytest.mark.req("SYNC-03")
@asynchronous
async def test_a_push_runs_its_phases_in_order_on_every_engine() -> None:
    bench = await Bench.formed()
    await bench.push(7)
    for engine in bench.engines:
        assert engine.calls == ["join_group", "pause", *PHASES, "publish 7", "resume"]
    assert (bench.state, bench.updates.version) == ("READY", 7)


@pytest.mark.req("SYNC-10")
@asynchronous
async def test_a_report_has_the_seconds_of_the_slowest_worker() -> None:
    bench = await Bench.formed()
    bench.engines[1].script["receive_weights"] = answers(
        {"transfer": 0.5, "load": 3.0}, {"transfer": 5.0, "load": 1.0}
    )
    report = await bench.push(1)
    assert set(report.seconds) == {"pause", "transfer", "load", "verify", "caches"}
    assert (report.seconds["transfer"], report.seconds["load"]) == (5.0, 7.0)
    assert (report.bytes, report.verified) == (8, 1)


@pytest.mark.req("SYNC-05")
@asynchronous
async def test_a_version_that_does_not_follow_is_refused() -> None:
    bench = await Bench.formed()
    await bench.push(3)
    for version, complaint in (
        (0, "does not come after the server's, 3"),
        (3, "does not come after the server's, 3"),
        (3 + MOST_VERSION_STEP + 1, "more than 1000000 after the server's, 3"),
        (MOST, "more than 1000000 after the server's, 3"),
    ):
        with pytest.raises(ProblemError, match=complaint) as caught:
            await bench.push(version)
        assert caught.value.problem.kind == "weight-update-order"
        assert (bench.state, bench.updates.version) == ("READY", 3)
    await bench.push(3 + MOST_VERSION_STEP)


@pytest.mark.req("SYNC-05", "SYNC-07")
@asynchronous
async def test_a_version_comes_again_where_a_replica_lacks_it_or_weights_are_mixed() -> None:
    bench = await Bench.formed()
    await bench.push(3)
    bench.engines[1].weights_version = 0
    await bench.push(3)
    assert [engine.weights_version for engine in bench.engines] == [3, 3]
    bench.engines[0].script["receive_weights"] = fails(BROKEN)
    with pytest.raises(ProblemError, match="broke"):
        await bench.push(4)
    bench.engines[0].script.clear()
    await bench.init()
    await bench.push(3)
    assert (bench.state, bench.updates.version) == ("READY", 3)


# --- the group


@pytest.mark.req("SYNC-03")
@pytest.mark.parametrize("transport", ["gloo", "nccl"])
@asynchronous
async def test_ranks_follow_the_order_of_engines(transport: str) -> None:
    bench = await Bench.formed(transport=transport, tensor_parallel_size=2)
    assert [e.inits[0]["rank_offset"] for e in bench.engines] == [1, 3]
    assert [e.inits[0]["world_size"] for e in bench.engines] == [5, 5]


@pytest.mark.req("SYNC-03")
def test_infos_for_nccl_have_the_fields_of_vllms_own_engine() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    from rollout_server.engines.vllm.nccl_engine import NcclInitInfo

    init = InitCommunicator(
        host="10.0.0.1",
        port=6000,
        world_size=4,
        attempt="a",
        transport="nccl",
        bucket_bytes=1024,
        nccl_unique_id=NCCL_ID,
    )
    info = NcclInitInfo(**init_info(init, "nccl", 3))
    assert info.nccl_unique_id_bytes == bytes(range(128))
    assert (info.rank_offset, info.world_size) == (3, 4)
    assert (info.host, info.port, info.timeout_s) == ("10.0.0.1", 6000, init.timeout_s)
    assert (info.packed, info.packed_buffer_size_bytes) == (True, 1024)
    update = NCCLWeightTransferUpdateInfo(**update_info("nccl", [PARAMETER.model_dump()]))
    assert (update.names, update.dtype_names, update.shapes) == (["a"], ["float32"], [[2]])


@pytest.mark.req("SYNC-04", "SRV-02", "FULL-07")
@pytest.mark.parametrize("transport", ["gloo", "ipc", "nccl"])
@asynchronous
async def test_no_engine_joins_a_group_before_its_learner(transport: str) -> None:
    """An engine that joins cannot answer calls."""
    bench = Bench(transport)
    with pytest.raises(ProblemError, match=r"learner \(rank 0\): missing for 0.5 s") as caught:
        await bench.init(timeout_s=0.5, learner_comes=False)
    assert caught.value.problem.status == 504
    assert caught.value.problem.where.startswith("rendezvous at")
    assert bench.engines[0].inits == bench.engines[1].inits == []
    await bench.init()
    assert len(bench.engines[0].inits) == 1


@pytest.mark.req("SYNC-04", "SYNC-07", "DEP-03")
@asynchronous
async def test_a_group_belongs_to_the_attempt_that_formed_it() -> None:
    bench = Bench()
    group = bench.updates.group
    with pytest.raises(ProblemError, match="no weight group"):
        bench.updates.heartbeat("first")
    await bench.init(attempt="first")
    formed = group.formed
    assert group.heard_s is not None
    with pytest.raises(ProblemError, match="a weight group exists") as caught:
        await bench.init(attempt="guest", if_none=True)
    assert caught.value.problem.status == 409
    await bench.start(1)
    assert (await bench.updates.close_communicator("guest")).state == "UPDATING"
    assert group.formed is formed
    for late in (
        bench.updates.start(StartWeightUpdate(version=1, parameters=[PARAMETER], attempt="guest")),
        bench.updates.receive(UpdateWeights(version=1, attempt="guest")),
        bench.updates.finish(FinishWeightUpdate(version=1, attempt="guest")),
    ):
        with pytest.raises(ProblemError, match="another group exists"):
            await late
    with pytest.raises(ProblemError, match="another group exists"):
        bench.updates.heartbeat("guest")
    assert bench.updates.heartbeat("first").state == "UPDATING"

    waiting = asyncio.ensure_future(bench.updates.wait_until_ready())
    await bench.init(attempt="second")
    with pytest.raises(ProblemError, match="full push"):
        await waiting
    assert (await bench.updates.close_communicator("first")).state == "POISONED"
    assert group.formed is not None
    await bench.updates.close_communicator("second")
    assert group.formed is None
    assert all(engine.calls[-1] == "leave_group" for engine in bench.engines)
    await bench.init(attempt="guest", if_none=True)
    assert group.heard_s is None, "a probe keeps no learner away"


@pytest.mark.req("SYNC-04", "SYNC-07", "DEP-03")
@pytest.mark.parametrize(
    ("phase", "by", "state"),
    [
        ("join_group", "init", "READY"),
        ("join_group", "close", "READY"),
        ("pause", "close", "READY"),
        ("receive_weights", "init", "POISONED"),
        ("read_back", "close", "POISONED"),
    ],
)
@asynchronous
async def test_a_running_phase_ends_by_a_new_group_or_the_end_of_its_own(
    phase: str, by: str, state: str
) -> None:
    bench = Bench()
    bench.engines[0].script[phase] = Hang()

    async def push() -> None:
        await bench.init(attempt="first")
        await bench.push(1)

    pushing = await begun(bench, phase, push())
    await bench.updates.close_communicator("another") if phase != "join_group" else None
    with pytest.raises(ProblemError, match="another learner's phase runs"):
        await bench.init(attempt="guest", if_none=True)
    assert not pushing.done()
    bench.engines[0].script.clear()
    if by == "init":
        await bench.init(attempt="second")
    else:
        await bench.updates.close_communicator("first")
    with pytest.raises(ProblemError, match="requested" if by == "init" else "was closed"):
        await pushing
    assert bench.state == state
    assert (bench.updates.group.formed is not None) == (by == "init")
    await bench.init()
    await bench.push(1)


async def begun(bench: Bench, phase: str, push: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A push whose `phase` hangs, as soon as engine 0 is in that phase."""
    pushing = asyncio.ensure_future(push)
    while phase not in bench.engines[0].calls:
        await asyncio.sleep(0)
    return pushing


@pytest.mark.req("SRV-05", "SYNC-07")
@asynchronous
async def test_a_lost_replica_breaks_the_group_and_the_others_leave_it() -> None:
    bench = await Bench.formed()
    await bench.push(3)
    bench.engines.lost = {1}
    await bench.updates.replica_lost("replica 1 is lost")
    assert (bench.state, bench.updates.version) == ("READY", 3)
    assert bench.engines[0].calls[-1] == "leave_group"
    await bench.updates.wait_until_ready()
    with pytest.raises(ProblemError) as missing:
        await bench.init()
    assert (missing.value.problem.status, missing.value.problem.where) == (503, "replicas[1]")
    bench.engines.lost = set()
    with pytest.raises(ProblemError, match="no weight group"):
        await bench.push(4)
    await bench.init()
    await bench.push(4)
    assert (bench.state, bench.updates.version) == ("READY", 4)


# --- manifests, bases and digests that do not fit


@pytest.mark.req("SYNC-05")
@asynchronous
async def test_a_manifest_that_does_not_fit_takes_the_start_back() -> None:
    """To POISONED where the state was POISONED before."""
    bench = await Bench.formed(tensor_parallel_size=2)
    bench.engines[1].script["open_weight_update"] = answers([], [FAULT])
    with pytest.raises(ProblemError) as caught:
        await bench.start(1)
    problem = caught.value.problem
    assert (problem.status, problem.kind) == (422, "manifest-mismatch")
    assert problem.errors == [{"where": "a", "fault": "missing", "detail": FAULT["detail"]}]
    assert (bench.state, bench.updates.version) == ("READY", 0)
    for engine in bench.engines:
        assert engine.calls[-2:] == ["abandon_weight_update", "resume"]
    await bench.updates.wait_until_ready()

    bench.engines[1].script = {"complete_load": fails(BROKEN)}
    with pytest.raises(ProblemError):
        await bench.push(1)
    bench.engines[1].script = {"open_weight_update": answers([FAULT] * 2)}
    with pytest.raises(ProblemError, match="1 fault"):
        await bench.start(1)
    assert bench.state == "POISONED"
    assert all(engine.calls.count("resume") == 1 for engine in bench.engines)


@pytest.mark.req("SYNC-06", "SYNC-05")
@asynchronous
async def test_weights_that_differ_from_what_was_sent_poison_before_caches_are_reset() -> None:
    bench = await Bench.formed()
    bench.engines[1].script["read_back"] = answers(OTHER)
    with pytest.raises(ProblemError) as caught:
        await bench.push(1)
    problem = caught.value.problem
    assert (problem.status, problem.kind) == (502, "weights-differ")
    assert problem.where.startswith("verify at 127.0.0.1:")
    assert problem.errors == [{"where": "a", "replica": 1, "detail": DIFFERS}]
    assert (bench.state, bench.updates.version) == ("POISONED", 0)
    for engine in bench.engines:
        assert not {"publish 1", "resume"} & set(engine.calls)


def over_base(digest: ParameterDigest = DIGEST) -> StartWeightUpdate:
    """An adapter and its base."""
    return StartWeightUpdate(
        version=1,
        parameters=[PARAMETER],
        adapter=AdapterMeta(r=1, lora_alpha=1, target_modules=["q"]),
        base=AdapterBase(parameters=[PARAMETER], digests=[digest]),
        attempt=None,
    )


@pytest.mark.req("SYNC-01", "SYNC-06")
@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (([], OTHER), f"a: replica 1: {DIFFERS}"),
        (([FAULT], []), f"{FAULT['name']}: {FAULT['detail']}"),
    ],
    ids=["values", "manifest"],
)
@asynchronous
async def test_an_adapter_of_another_base_is_refused_and_changes_nothing(
    answer: Any, found: str
) -> None:
    bench = await Bench.formed()
    bench.engines[1].script["check_base"] = answers(answer)
    with pytest.raises(ProblemError) as caught:
        await bench.updates.start(over_base())
    problem = caught.value.problem
    assert (problem.status, problem.kind) == (422, "adapter-refused")
    assert f"the engines' weights are not the learner's base: {found}" in problem.detail
    assert (bench.state, bench.updates.version) == ("READY", 0)
    for engine in bench.engines:
        assert "open_adapter_update" not in engine.calls
        assert engine.calls[-1] == "resume"
        engine.calls.clear()
    bench.engines[1].script.clear()
    await bench.updates.start(over_base())
    opened = ["pause", "adapter_faults", "check_base", "open_adapter_update"]
    assert all(engine.calls == opened for engine in bench.engines)


@pytest.mark.req("SYNC-06")
@asynchronous
async def test_an_invalid_base_is_refused_before_any_pause() -> None:
    bench = await Bench.formed()
    for body in (
        over_base().model_copy(update={"adapter": None}),
        over_base(DIGEST.model_copy(update={"name": "b"})),
        over_base(DIGEST.model_copy(update={"columns": [1]})),
    ):
        with pytest.raises(ProblemError) as caught:
            await bench.updates.start(body)
        problem = caught.value.problem
        assert (problem.kind, problem.where) == ("invalid-request", "base")
    assert bench.state == "READY"
    assert all("pause" not in engine.calls for engine in bench.engines)


@pytest.mark.req("SYNC-06")
@asynchronous
async def test_digests_that_do_not_fit_the_manifest_are_refused_and_the_update_goes_on() -> None:
    bench = await Bench.formed()
    await bench.start(1)
    await bench.receive(1)
    for digests, complaint in (
        ([DIGEST.model_copy(update={"name": "b"})], "b is not in the manifest"),
        ([DIGEST, DIGEST], "two digests"),
        ([DIGEST.model_copy(update={"columns": [1]})], "a has 1 column"),
        ([DIGEST.model_copy(update={"columns": []})], "ascending"),
    ):
        body = FinishWeightUpdate(version=1, digests=digests, attempt=None)
        with pytest.raises(ProblemError, match=complaint) as caught:
            await bench.updates.finish(body)
        assert caught.value.problem.status == 422
    assert (await bench.finish(1)).status.state == "READY"


# --- updates that break


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize(
    ("phase", "error", "status"),
    [
        *((phase, BROKEN, 502) for phase in (*PHASES, "publish 7")),
        ("receive_weights", EngineDead("gone"), 503),
        ("receive_weights", KeyError("a bug"), None),
    ],
)
@asynchronous
async def test_one_engine_that_breaks_poisons_all_until_a_full_push(
    phase: str, error: Exception, status: int | None
) -> None:
    bench = await Bench.formed()
    bench.engines[1].script[phase] = fails(error)
    with pytest.raises((ProblemError, KeyError)) as caught:
        await bench.push(7)
    if isinstance(caught.value, ProblemError):
        assert caught.value.problem.status == status
    assert (bench.state, bench.updates.version) == ("POISONED", 0)
    transferring = phase == "receive_weights"
    for engine in bench.engines:
        left = ["leave_group"] if transferring else []
        cleaned = engine.calls.index("abandon_weight_update")
        assert engine.calls[cleaned:] == ["abandon_weight_update", "abort_all", *left]
        assert "resume" not in engine.calls
    with pytest.raises(ProblemError, match="full push"):
        await bench.updates.wait_until_ready()
    del bench.engines[1].script[phase]
    if transferring:
        with pytest.raises(ProblemError, match="no weight group"):
            await bench.start(8)
        await bench.init()
    await bench.push(8)
    await bench.updates.wait_until_ready()
    assert bench.updates.version == 8


@pytest.mark.req("SYNC-04")
@asynchronous
async def test_a_cancelled_transfer_poisons() -> None:
    bench = await Bench.formed()
    await bench.start(1)
    bench.engines[0].script["receive_weights"] = Hang()
    receiving = await begun(bench, "receive_weights", bench.receive(1))
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert bench.state == "POISONED"
    with pytest.raises(ProblemError, match="no weight group"):
        await bench.start(2)


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize(
    ("longest_s", "timeout_s"), [(60.0, 0.5), (0.5, 86400)], ids=["asked for", "bounded"]
)
@asynchronous
async def test_an_engine_that_hangs_is_given_up_at_the_deadline(
    longest_s: float, timeout_s: float
) -> None:
    """The deadline is the learner's, bounded by the server's."""
    bench = Bench(longest_s=longest_s)
    await bench.init(timeout_s=timeout_s)
    assert [each.inits[0]["timeout_s"] for each in bench.engines] == [0.5, 0.5]
    transfer, clean_up = Hang(), Hang()
    bench.engines[0].script |= {"receive_weights": transfer, "abandon_weight_update": clean_up}
    with pytest.raises(ProblemError, match=r"within 0\.6 s") as caught:
        await bench.push(7)
    assert caught.value.problem.status == 504
    assert caught.value.problem.where.startswith("transfer at 127.0.0.1:")
    assert bench.state == "POISONED"
    assert transfer.given_up
    assert clean_up.given_up


@pytest.mark.req("SYNC-04")
@asynchronous
async def test_a_drain_that_takes_too_long_takes_the_start_back() -> None:
    """To POISONED where the state was POISONED before."""
    bench = Bench()
    await bench.init(timeout_s=1.0)
    bench.engines[0].script["pause"] = Hang()
    with pytest.raises(ProblemError):
        await bench.start(1)
    assert bench.state == "READY"
    assert all(engine.calls[-1] == "resume" for engine in bench.engines)

    bench.engines[0].script = {"receive_weights": fails(BROKEN)}
    with pytest.raises(ProblemError):
        await bench.push(1)
    await bench.init(timeout_s=1.0)
    bench.engines[0].script = {"pause": Hang()}
    with pytest.raises(ProblemError):
        await bench.start(1)
    assert bench.state == "POISONED"
    assert bench.engines[0].calls.count("resume") == 1


@pytest.mark.req("SYNC-04")
@asynchronous
async def test_an_update_without_a_next_phase_poisons() -> None:
    bench = Bench()
    await bench.init(timeout_s=1.0)
    await bench.start(1)
    with pytest.raises(ProblemError, match="full push"):
        await bench.updates.wait_until_ready()
    assert bench.state == "POISONED"


@pytest.mark.req("SRV-05", "SYNC-04")
@asynchronous
async def test_the_loss_of_one_engine_does_not_wait_for_another_that_hangs() -> None:
    bench = Bench()
    await bench.init(timeout_s=60.0)
    hang = Hang()
    bench.engines[0].script["receive_weights"] = hang
    bench.engines[1].script["receive_weights"] = fails(EngineDead("replica 1 is dead"))
    with pytest.raises(ProblemError, match="replica 1 is dead"):
        await bench.push(1)
    assert hang.given_up


# --- learners that are silent


@pytest.mark.req("SYNC-04", "SRV-05")
@pytest.mark.parametrize(("phase", "state"), [("pause", "READY"), ("receive_weights", "POISONED")])
@asynchronous
async def test_a_phase_of_a_silent_learner_ends(phase: str, state: str) -> None:
    """An engine whose worker cannot leave the group is given up."""
    bench = Bench(gone_after_s=2.0)
    await bench.init(timeout_s=60.0)
    bench.engines[0].script |= {phase: Hang(), "leave_group": Hang()}
    with pytest.raises(ProblemError, match="no heartbeat for 2 s") as caught:
        await bench.push(1)
    assert caught.value.problem.status == 502
    assert (bench.state, bench.updates.version) == (state, 0)
    held = phase == "receive_weights"
    assert [engine.given_up for engine in bench.engines] == [held, False]
    bench.engines[0].script.clear()
    await bench.init()
    await bench.push(1)
    assert (bench.state, bench.updates.version) == ("READY", 1)


# --- engines that sleep


@pytest.mark.req("ROLL-03", "SYNC-04")
@asynchronous
async def test_a_push_to_a_sleeping_engine_wakes_the_weights_first() -> None:
    bench = await Bench.formed()
    await bench.updates.sleep()
    assert all(engine.asleep for engine in bench.engines)
    before = len(bench.engines[0].calls)
    await bench.push(1)
    await bench.updates.wait_until_ready()
    assert not any(engine.asleep for engine in bench.engines)
    for engine in bench.engines:
        assert engine.calls[before:] == ["pause", "wake_weights", *PHASES, "publish 1", "resume"]
    await bench.updates.sleep()
    status = await bench.updates.wake_up()
    assert (status.state, status.weights_version) == ("READY", 1)
    await bench.updates.wait_until_ready()


@pytest.mark.req("ROLL-03", "SYNC-04")
@pytest.mark.parametrize("phase", ["wake_weights", "receive_weights"])
@asynchronous
async def test_an_update_that_breaks_after_a_sleep_poisons(phase: str) -> None:
    bench = await Bench.formed()
    await bench.updates.sleep()
    bench.engines[1].script[phase] = fails(BROKEN)
    with pytest.raises(ProblemError):
        await bench.push(1)
    assert bench.state == "POISONED"
    for refused in (bench.updates.sleep, bench.updates.wake_up):
        with pytest.raises(ProblemError, match="POISONED"):
            await refused()
    with pytest.raises(ProblemError, match="full push"):
        await bench.updates.wait_until_ready()
    assert "resume" not in bench.engines[0].calls


@pytest.mark.req("ROLL-03")
@asynchronous
async def test_an_engine_that_breaks_or_hangs_in_its_sleep_is_not_ready() -> None:
    bench = Bench(longest_s=1.0)
    for script, status in (
        (fails(EngineDead("replica 1 did not move its memory")), 503),
        (Hang(), 504),
    ):
        bench.engines[1].script["sleep"] = script
        with pytest.raises(ProblemError) as caught:
            await bench.updates.sleep()
        assert (caught.value.problem.status, caught.value.problem.where) == (status, "/sleep/")
        assert any(engine.asleep for engine in bench.engines)
    await bench.updates.wake_up()
    await bench.updates.wait_until_ready()
    await bench.init()
    await bench.start(1)
    with pytest.raises(ProblemError, match="the state is UPDATING") as caught:
        await bench.updates.sleep()
    assert caught.value.problem.status == 409


# --- trials


def trial(version: int) -> StartWeightUpdate:
    return StartWeightUpdate(
        version=version,
        parameters=[PARAMETER],
        base=AdapterBase(parameters=[PARAMETER], digests=[DIGEST]),
        trial=True,
        attempt=None,
    )


@pytest.mark.req("SYNC-05", "DEP-03")
@asynchronous
async def test_a_trial_changes_nothing_also_where_it_breaks() -> None:
    bench = await Bench.formed()
    await bench.push(3)
    for engine in bench.engines:
        engine.calls.clear()
    await bench.updates.start(trial(3))
    await bench.receive(3)
    report = await bench.finish(3)
    phases = ["check_base", "open_trial", "receive_weights", "complete_load", "read_back"]
    assert all(engine.calls == ["pause", *phases, "resume"] for engine in bench.engines)
    assert (report.trial, report.verified, report.status.weights_version) == (True, 1, 3)
    bench.engines[1].script["receive_weights"] = fails(BROKEN)
    await bench.updates.start(trial(3))
    with pytest.raises(ProblemError):
        await bench.receive(3)
    assert all(engine.calls[-1] == "resume" for engine in bench.engines)
    assert (bench.state, bench.updates.version) == ("READY", 3)
    await bench.init()
    for body, complaint in (
        (trial(2), "version 2 cannot be tried"),
        (trial(3).model_copy(update={"base": None}), "the engines should hold"),
    ):
        with pytest.raises(ProblemError, match=complaint):
            await bench.updates.start(body)
    with pytest.raises(ValidationError, match="no adapter"):
        StartWeightUpdate.model_validate(over_base().model_dump() | {"trial": True})
