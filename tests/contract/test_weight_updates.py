"""States and deadlines of a weight update, with scripted engines."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from learner.operate.server_process import free_ports
from rollout_server.engine_types import EngineDead, WeightPhaseFailed
from rollout_server.problems import refusal
from rollout_server.weight_updates import WeightUpdates, init_info, update_info
from shared_contracts.errors import ProblemError
from shared_contracts.weights import (
    FinishWeightUpdate,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    UpdateWeights,
)

PARAMETER = ParameterMeta(name="a", dtype="float32", shape=[2])


class ScriptedEngine:
    """Writes down what it is told; `script` maps a phase to what happens in it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.script: dict[str, Callable[[], Awaitable[None]]] = {}
        self.inits: list[dict[str, Any]] = []

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.script:
            await self.script[name]()

    async def pause(self) -> None:
        await self._do("pause")

    async def resume(self) -> None:
        await self._do("resume")

    async def abort_all(self) -> None:
        await self._do("abort_all")

    async def publish(self, version: int) -> None:
        await self._do(f"publish {version}")

    async def weight_phase(self, name: str, **arguments: Any) -> None:
        if name == "init_weight_transfer_engine":
            self.inits.append(arguments["init_info"])
        await self._do(name)


def fails(error: Exception) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


async def hangs() -> None:
    await asyncio.sleep(60)


class Hang:
    """Something that hangs, and whether it was given up."""

    given_up = False

    async def __call__(self) -> None:
        try:
            await hangs()
        except asyncio.CancelledError:
            self.given_up = True
            raise


class ScriptedEngines(list[ScriptedEngine]):
    """Two engines; `lost` holds the indices of those that are gone."""

    def __init__(self) -> None:
        super().__init__([ScriptedEngine(), ScriptedEngine()])
        self.lost: set[int] = set()

    def all(self) -> list[ScriptedEngine]:
        if self.lost:
            raise refusal("not-ready", "an engine is gone", f"replicas[{min(self.lost)}]")
        return list(self)

    def alive(self) -> list[ScriptedEngine]:
        return [engine for index, engine in enumerate(self) if index not in self.lost]


class Bench:
    """Two scripted engines and the updates over them."""

    def __init__(
        self,
        transport: Any = "gloo",
        tensor_parallel_size: int = 1,
        worker_margin_s: float = 0.1,
    ) -> None:
        self.engines = ScriptedEngines()
        self.updates = WeightUpdates(
            self.engines, tensor_parallel_size, transport, lambda: "epoch", worker_margin_s
        )
        self.transport = transport
        self.world_size = 1 + 2 * tensor_parallel_size

    async def init(self, timeout_s: float = 5.0) -> None:
        (port,) = free_ports(1)
        await self.updates.init_communicator(
            InitCommunicator(
                host="127.0.0.1",
                port=port,
                world_size=self.world_size,
                transport=self.transport,
                timeout_s=timeout_s,
            )
        )

    @property
    def state(self) -> str:
        return self.updates.state

    async def push(self, version: int) -> None:
        await self.updates.start(StartWeightUpdate(version=version))
        await self.updates.receive(UpdateWeights(parameters=[PARAMETER]))
        await self.updates.finish(FinishWeightUpdate(version=version))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


@pytest.mark.req("SYNC-03")
def test_a_push_runs_its_phases_in_order_on_every_engine() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.push(7)
        for engine in bench.engines:
            assert engine.calls == [
                "init_weight_transfer_engine",
                "pause",
                "start_weight_update",
                "update_weights",
                "finish_weight_update",
                "publish 7",
                "resume",
            ]
        assert (bench.state, bench.updates.version) == ("READY", 7)

    run(work())


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
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    init = InitCommunicator(
        host="10.0.0.1", port=6000, world_size=4, transport="nccl", bucket_bytes=1024
    )
    info = NCCLWeightTransferInitInfo(**init_info(init, "nccl", 3))
    assert (info.master_address, info.master_port) == ("10.0.0.1", 6000)
    assert (info.rank_offset, info.world_size) == (3, 4)
    assert info.packed
    assert info.packed_buffer_size_bytes == 1024
    update = NCCLWeightTransferUpdateInfo(**update_info("nccl", [PARAMETER]))
    assert (update.names, update.dtype_names, update.shapes) == (["a"], ["float32"], [[2]])


BREAKS = [
    ("start_weight_update", WeightPhaseFailed("no"), 502),
    ("update_weights", WeightPhaseFailed("no"), 502),
    ("finish_weight_update", WeightPhaseFailed("no"), 502),
    ("publish 7", WeightPhaseFailed("no"), 502),
    ("update_weights", EngineDead("gone"), 503),
    ("update_weights", KeyError("a bug"), None),
]


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize(("phase", "error", "status"), BREAKS)
def test_one_engine_that_breaks_poisons_all_and_a_full_push_heals(
    phase: str, error: Exception, status: int | None
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[1].script[phase] = fails(error)
        with pytest.raises((ProblemError, KeyError)) as caught:
            await bench.push(7)
        if isinstance(caught.value, ProblemError):
            assert caught.value.problem.status == status
        assert (bench.state, bench.updates.version) == ("POISONED", 0)
        for engine in bench.engines:
            assert engine.calls[-2:] == ["abandon_weight_update", "abort_all"]
            assert "resume" not in engine.calls
        with pytest.raises(ProblemError, match="full push"):
            await bench.updates.wait_until_ready()
        del bench.engines[1].script[phase]
        await bench.push(8)
        await bench.updates.wait_until_ready()
        assert bench.updates.version == 8

    run(work())


@pytest.mark.req("SYNC-04")
def test_an_engine_that_never_answers_is_given_up() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=0.2)
        transfer, clean_up = Hang(), Hang()
        bench.engines[0].script["update_weights"] = transfer
        bench.engines[0].script["abandon_weight_update"] = clean_up
        with pytest.raises(ProblemError) as caught:
            await bench.push(7)
        assert caught.value.problem.status == 504
        assert caught.value.problem.where.startswith("transfer at 127.0.0.1:")
        assert bench.state == "POISONED"
        assert transfer.given_up
        assert clean_up.given_up

    run(work())


@pytest.mark.req("SYNC-04")
def test_a_failed_rendezvous_leaves_weights_and_state_alone() -> None:
    async def work() -> None:
        bench = Bench()
        bench.engines[0].script["init_weight_transfer_engine"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError) as caught:
            await bench.init()
        assert caught.value.problem.where.startswith("rendezvous at")
        assert bench.state == "READY"
        with pytest.raises(ProblemError, match="no weight group"):
            await bench.updates.start(StartWeightUpdate(version=1))

    run(work())


@pytest.mark.req("SYNC-04")
def test_a_slow_drain_takes_the_start_back_and_a_poisoned_server_stays_poisoned() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=0.1)
        bench.engines[0].script["pause"] = hangs
        with pytest.raises(ProblemError):
            await bench.updates.start(StartWeightUpdate(version=1))
        assert bench.state == "READY"
        assert all(engine.calls[-1] == "resume" for engine in bench.engines)

        del bench.engines[0].script["pause"]
        bench.engines[0].script["update_weights"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError):
            await bench.push(1)
        bench.engines[0].script = {"pause": hangs}
        with pytest.raises(ProblemError):
            await bench.updates.start(StartWeightUpdate(version=1))
        assert bench.state == "POISONED"
        assert bench.engines[0].calls.count("resume") == 1

    run(work())


@pytest.mark.req("SYNC-04")
def test_silence_between_phases_poisons_but_a_long_phase_does_not() -> None:
    async def work() -> None:
        bench = Bench(worker_margin_s=5.0)
        await bench.init(timeout_s=0.2)
        await bench.updates.start(StartWeightUpdate(version=1))
        bench.engines[0].script["update_weights"] = lambda: asyncio.sleep(0.4)
        await bench.updates.receive(UpdateWeights(parameters=[PARAMETER]))
        assert bench.state == "UPDATING"
        await asyncio.sleep(0.5)
        assert bench.state == "POISONED"

    run(work())


@pytest.mark.req("SYNC-04")
def test_closing_the_group_ends_an_open_update() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.updates.start(StartWeightUpdate(version=1))
        waiting = asyncio.ensure_future(bench.updates.wait_until_ready())
        status = await bench.updates.close_communicator()
        assert status.state == "POISONED"
        with pytest.raises(ProblemError, match="full push"):
            await waiting
        assert all(e.calls[-1] == "shutdown_weight_transfer_engine" for e in bench.engines)

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
        assert bench.engines[0].calls[-1] == "shutdown_weight_transfer_engine"
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


@pytest.mark.req("SRV-05", "SYNC-05")
def test_a_replica_lost_between_the_phases_of_an_update_poisons() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.updates.start(StartWeightUpdate(version=1))
        bench.engines.lost = {0}
        with pytest.raises(ProblemError, match="an engine is gone"):
            await bench.updates.receive(UpdateWeights(parameters=[PARAMETER]))
        assert bench.state == "POISONED"
        await bench.updates.replica_lost("replica 0 is lost")
        assert bench.state == "POISONED"
        assert bench.engines[1].calls[-1] == "shutdown_weight_transfer_engine"

    run(work())


@pytest.mark.req("SRV-05", "SYNC-05")
def test_a_replica_lost_while_the_update_drains_leaves_the_old_weights_serving() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()

        async def dies() -> None:
            bench.engines.lost = {1}
            raise EngineDead("replica 1 is dead")

        bench.engines[1].script["pause"] = dies
        with pytest.raises(ProblemError, match="replica 1 is dead"):
            await bench.updates.start(StartWeightUpdate(version=1))
        assert bench.state == "READY"
        assert bench.engines[0].calls[-1] == "resume"

    run(work())


@pytest.mark.req("SRV-05", "SYNC-04")
def test_the_loss_of_one_engine_does_not_wait_for_another_that_hangs() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=60.0)
        hang = Hang()
        bench.engines[0].script["update_weights"] = hang
        bench.engines[1].script["update_weights"] = fails(EngineDead("replica 1 is dead"))
        with pytest.raises(ProblemError, match="replica 1 is dead"):
            await bench.push(1)
        assert hang.given_up

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


@pytest.mark.req("SYNC-05")
def test_a_version_never_comes_again() -> None:
    """Else an engine built anew, at version 0, could pass for one with those weights."""

    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.push(3)
        for version in (0, 3):
            with pytest.raises(ProblemError, match="does not come after the server's, 3"):
                await bench.push(version)
            assert bench.state == "READY"
        await bench.push(4)

    run(work())
