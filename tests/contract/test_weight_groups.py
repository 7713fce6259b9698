"""The weight group: who joins it, who may end it, and what its end does to an update."""

import asyncio
from types import SimpleNamespace

import pytest

from rollout_server.engines.engine_protocol import WeightPhaseFailed
from rollout_server.engines.vllm.weight_engines import init_info, update_info
from shared_contracts.errors import ProblemError
from shared_contracts.weights import (
    AdapterBase,
    FinishWeightUpdate,
    InitCommunicator,
    StartWeightUpdate,
    UpdateWeights,
)
from tests.contract.update_bench import DIGEST, NCCL_ID, PARAMETER, Bench, fails, run


@pytest.mark.req("SYNC-03")
@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_workers_of_engine_i_come_after_those_of_the_engines_before(transport: str) -> None:
    async def work() -> None:
        bench = Bench(transport, tensor_parallel_size=2)
        await bench.init()
        assert [e.inits[0]["rank_offset"] for e in bench.engines] == [1, 3]
        assert [e.inits[0]["world_size"] for e in bench.engines] == [5, 5]

    run(work())


@pytest.mark.req("SYNC-03")
def test_nccl_is_told_in_the_words_of_vllms_own_engine() -> None:
    """Held against the dataclasses that vLLM's worker builds from them."""
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
    assert info.packed
    assert info.packed_buffer_size_bytes == 1024
    update = NCCLWeightTransferUpdateInfo(**update_info("nccl", [PARAMETER.model_dump()]))
    assert (update.names, update.dtype_names, update.shapes) == (["a"], ["float32"], [[2]])


@pytest.mark.req("SYNC-04")
def test_a_failed_rendezvous_leaves_weights_and_state_alone() -> None:
    async def work() -> None:
        bench = Bench()
        bench.engines[0].script["join_group"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError) as caught:
            await bench.init()
        assert caught.value.problem.where.startswith("rendezvous at")
        assert bench.state == "READY"
        with pytest.raises(ProblemError, match="no weight group"):
            await bench.start(1)

    run(work())


@pytest.mark.req("SYNC-04", "SRV-02", "FULL-07")
@pytest.mark.parametrize("transport", ["gloo", "ipc", "nccl"])
def test_no_engine_waits_for_a_learner_that_does_not_come(transport: str) -> None:
    """It would answer nobody meanwhile."""

    async def work() -> None:
        bench = Bench(transport)
        with pytest.raises(ProblemError, match=r"learner \(rank 0\): missing for 0.5 s") as caught:
            await bench.init(timeout_s=0.5, learner_comes=False)
        assert caught.value.problem.status == 504
        assert caught.value.problem.where.startswith("rendezvous at")
        assert bench.engines[0].inits == bench.engines[1].inits == []
        await bench.init()
        assert len(bench.engines[0].inits) == 1

    run(work())


@pytest.mark.req("SYNC-04", "DEP-03")
def test_a_group_is_left_alone_by_who_asks_for_none_and_closed_by_its_own_attempt() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(attempt="first")
        group = bench.updates.group.formed
        with pytest.raises(ProblemError, match="a weight group exists") as caught:
            await bench.init(attempt="guest", if_none=True)
        assert caught.value.problem.status == 409
        await bench.start(1)
        assert (await bench.updates.close_communicator("guest")).state == "UPDATING"
        assert bench.updates.group.formed is group
        body = StartWeightUpdate(version=1, parameters=[PARAMETER], attempt="guest")
        for late in (
            bench.updates.start(body),
            bench.updates.receive(UpdateWeights(version=1, attempt="guest")),
            bench.updates.finish(FinishWeightUpdate(version=1, attempt="guest")),
        ):
            with pytest.raises(ProblemError, match="another group exists"):
                await late
        assert bench.state == "UPDATING"
        await bench.init(attempt="second")  # a learner that comes again
        assert (await bench.updates.close_communicator("first")).state == "POISONED"
        assert bench.updates.group.formed is not None
        await bench.updates.close_communicator("second")
        assert bench.updates.group.formed is None
        await bench.init(attempt="guest", if_none=True)
        assert bench.updates.group.formed is not None

    run(work())


@pytest.mark.req("SYNC-04", "DEP-03")
def test_who_asks_for_no_group_keeps_out_of_the_way_of_one_that_forms() -> None:
    async def work() -> None:
        bench = Bench()
        joining, may_join = asyncio.Event(), asyncio.Event()

        async def joins() -> None:
            joining.set()
            await may_join.wait()

        bench.engines[0].script["join_group"] = joins
        first = asyncio.ensure_future(bench.init(attempt="first"))
        await joining.wait()
        with pytest.raises(ProblemError, match="phase runs"):
            await bench.init(attempt="guest", if_none=True)
        closing = asyncio.ensure_future(bench.updates.close_communicator("guest"))
        may_join.set()
        await first
        await closing
        assert bench.updates.group.formed is not None

    run(work())


@pytest.mark.req("SYNC-07")
def test_a_group_is_heard_of_by_the_signs_of_its_own_learner_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("rollout_server.weights.weight_group.time", clock)

    async def work() -> None:
        bench = Bench()
        with pytest.raises(ProblemError, match="no weight group"):
            bench.updates.heartbeat("first")
        assert bench.updates.group.heard_s is None
        await bench.init(attempt="first")
        assert bench.updates.group.heard_s == 1, "its learner was there to form it"
        await bench.start(1)
        assert bench.updates.heartbeat("first").state == "UPDATING"
        assert bench.updates.group.heard_s == 1
        assert bench.updates.group.heard_s == 2
        with pytest.raises(ProblemError, match="another group exists") as caught:
            bench.updates.heartbeat("second")
        assert caught.value.problem.status == 409
        await bench.updates.close_communicator()
        assert bench.updates.group.heard_s is None
        await bench.init(attempt="guest", if_none=True)
        assert bench.updates.group.heard_s is None, "a guest is gone soon"

    run(work())


@pytest.mark.req("SYNC-07")
@pytest.mark.parametrize("trial", [False, True])
def test_a_group_that_broke_is_heard_of_no_more(trial: bool) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        version = 0 if trial else 1
        base = AdapterBase(parameters=[PARAMETER], digests=[DIGEST]) if trial else None
        await bench.updates.start(
            StartWeightUpdate(
                version=version, parameters=[PARAMETER], base=base, trial=trial, attempt=None
            )
        )
        bench.engines[0].script["receive_weights"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError):
            await bench.updates.receive(UpdateWeights(version=version, attempt=None))
        assert (bench.state, bench.updates.group.formed) == ("READY" if trial else "POISONED", None)
        assert bench.updates.group.heard_s is None

    run(work())


@pytest.mark.req("SYNC-04")
def test_closing_the_group_ends_an_open_update() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.start(1)
        waiting = asyncio.ensure_future(bench.updates.wait_until_ready())
        status = await bench.updates.close_communicator()
        assert status.state == "POISONED"
        with pytest.raises(ProblemError, match="full push"):
            await waiting
        assert all(e.calls[-1] == "leave_group" for e in bench.engines)

    run(work())


@pytest.mark.req("SRV-05", "SYNC-07")
def test_a_lost_replica_breaks_the_group_and_the_others_leave_it() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
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

    run(work())


@pytest.mark.req("SRV-05", "SYNC-07")
def test_the_group_of_a_server_that_lost_its_last_engine_is_given_up() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines.lost = {0, 1}
        await bench.updates.replica_lost("the last replica is lost")
        bench.engines.lost = set()
        with pytest.raises(ProblemError, match="no weight group"):
            await bench.push(1)

    run(work())
