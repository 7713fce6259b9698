"""States and deadlines of a weight update, with scripted engines."""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from learner.operate.server_process import free_ports
from rollout_server.engine_types import EngineDead, WeightPhaseFailed
from rollout_server.problems import refusal
from rollout_server.transfer_info import init_info, update_info
from rollout_server.weight_updates import WeightUpdates
from shared_contracts.errors import ProblemError
from shared_contracts.weights import (
    AdapterBase,
    AdapterMeta,
    DtypeName,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterDigest,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    UpdateWeights,
)

NCCL_ID = base64.b64encode(bytes(range(128))).decode()
PARAMETER = ParameterMeta(name="a", dtype="float32", shape=[2])
DIGEST = ParameterDigest(name="a", digest=f"{7:016x}")

# Of the one worker, where nothing else is scripted.
ANSWERS: dict[str, list[Any]] = {
    "open_weight_update": [[]],
    "adapter_faults": [[]],
    "check_base": [([], [[("m", 0, 0, 2, 1, 7)]])],
    "receive_weights": [{"transfer": 1.0, "load": 2.0}],
    "complete_load": [{"load": 4.0}],
    "read_back": [[[("m", 0, 0, 2, 1, 7)]]],
}


Happening = Callable[[], Awaitable[list[Any] | None]]


class ScriptedEngine:
    """Writes down what it is told; `script` maps a phase to what happens in it.

    What happens may give the answers of the engine's workers, of which there is one.
    """

    dtype: DtypeName = "float32"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.script: dict[str, Happening] = {}
        self.inits: list[dict[str, Any]] = []
        self.weights_version = 0

    async def _do(self, name: str) -> list[Any]:
        self.calls.append(name)
        answers = await self.script[name]() if name in self.script else None
        return ANSWERS.get(name, [None]) if answers is None else answers

    async def pause(self) -> None:
        await self._do("pause")

    async def resume(self) -> None:
        await self._do("resume")

    async def abort_all(self) -> None:
        await self._do("abort_all")

    async def publish(self, version: int) -> None:
        await self._do(f"publish {version}")
        self.weights_version = version

    async def weight_phase(self, name: str, **arguments: Any) -> list[Any]:
        if name == "init_weight_transfer_engine":
            self.inits.append(arguments["init_info"])
        return await self._do(name)


def fails(error: Exception) -> Happening:
    async def fail() -> None:
        raise error

    return fail


def answers(*of_workers: Any) -> Happening:
    async def answer() -> list[Any]:
        return list(of_workers)

    return answer


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

    async def init(self, timeout_s: float = 5.0, attempt: str = "", if_none: bool = False) -> None:
        (port,) = free_ports(1)
        await self.updates.init_communicator(
            InitCommunicator(
                host="127.0.0.1",
                port=port,
                world_size=self.world_size,
                transport=self.transport,
                timeout_s=timeout_s,
                attempt=attempt,
                if_none=if_none,
                nccl_unique_id=NCCL_ID if self.transport == "nccl" else None,
            )
        )

    @property
    def state(self) -> str:
        return self.updates.state

    async def start(self, version: int) -> None:
        await self.updates.start(StartWeightUpdate(version=version, parameters=[PARAMETER]))

    async def push(self, version: int) -> SyncReport:
        await self.start(version)
        await self.updates.receive(UpdateWeights(version=version))
        return await self.updates.finish(FinishWeightUpdate(version=version, digests=[DIGEST]))


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
                "open_weight_update",
                "receive_weights",
                "complete_load",
                "read_back",
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
        host="10.0.0.1",
        port=6000,
        world_size=4,
        transport="nccl",
        bucket_bytes=1024,
        nccl_unique_id=NCCL_ID,
    )
    info = NCCLWeightTransferInitInfo(**init_info(init, "nccl", 3))
    assert info.nccl_unique_id_bytes == bytes(range(128))
    assert (info.rank_offset, info.world_size) == (3, 4)
    assert info.packed
    assert info.packed_buffer_size_bytes == 1024
    update = NCCLWeightTransferUpdateInfo(**update_info("nccl", [PARAMETER]))
    assert (update.names, update.dtype_names, update.shapes) == (["a"], ["float32"], [[2]])


BREAKS = [
    ("open_weight_update", WeightPhaseFailed("no"), 502),
    ("receive_weights", WeightPhaseFailed("no"), 502),
    ("complete_load", WeightPhaseFailed("no"), 502),
    ("read_back", WeightPhaseFailed("no"), 502),
    ("publish 7", WeightPhaseFailed("no"), 502),
    ("receive_weights", EngineDead("gone"), 503),
    ("receive_weights", KeyError("a bug"), None),
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
        transferring = phase == "receive_weights"
        for engine in bench.engines:
            leaves = ["shutdown_weight_transfer_engine"] if transferring else []
            cleaned = engine.calls.index("abandon_weight_update")
            assert engine.calls[cleaned:] == ["abandon_weight_update", "abort_all", *leaves]
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

    run(work())


@pytest.mark.req("SYNC-04")
def test_a_call_that_is_cancelled_in_the_transfer_poisons() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.start(1)
        bench.engines[0].script["receive_weights"] = hangs
        receiving = asyncio.ensure_future(bench.updates.receive(UpdateWeights(version=1)))
        while "receive_weights" not in bench.engines[0].calls:
            await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert bench.state == "POISONED"
        with pytest.raises(ProblemError, match="no weight group"):
            await bench.start(2)

    run(work())


@pytest.mark.req("SYNC-04")
def test_an_engine_that_never_answers_is_given_up() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=0.2)
        transfer, clean_up = Hang(), Hang()
        bench.engines[0].script["receive_weights"] = transfer
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
            await bench.start(1)

    run(work())


@pytest.mark.req("SYNC-04")
def test_a_slow_drain_takes_the_start_back_and_a_poisoned_server_stays_poisoned() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=0.1)
        bench.engines[0].script["pause"] = hangs
        with pytest.raises(ProblemError):
            await bench.start(1)
        assert bench.state == "READY"
        assert all(engine.calls[-1] == "resume" for engine in bench.engines)

        del bench.engines[0].script["pause"]
        bench.engines[0].script["receive_weights"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError):
            await bench.push(1)
        bench.engines[0].script = {"pause": hangs}
        with pytest.raises(ProblemError):
            await bench.start(1)
        assert bench.state == "POISONED"
        assert bench.engines[0].calls.count("resume") == 1

    run(work())


@pytest.mark.req("SYNC-04")
def test_silence_between_phases_poisons_but_a_long_phase_does_not() -> None:
    async def work() -> None:
        bench = Bench(worker_margin_s=5.0)
        await bench.init(timeout_s=0.2)
        await bench.start(1)

        async def slow() -> None:
            await asyncio.sleep(0.4)

        bench.engines[0].script["receive_weights"] = slow
        await bench.updates.receive(UpdateWeights(version=1))
        assert bench.state == "UPDATING"
        await asyncio.sleep(0.5)
        assert bench.state == "POISONED"

    run(work())


@pytest.mark.req("SYNC-04", "DEP-03")
def test_a_group_is_left_alone_by_who_asks_for_none_and_closed_by_its_own_attempt() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(attempt="first")
        group = bench.updates.group
        with pytest.raises(ProblemError, match="a weight group stands") as caught:
            await bench.init(attempt="guest", if_none=True)
        assert caught.value.problem.status == 409
        await bench.start(1)
        assert (await bench.updates.close_communicator("guest")).state == "UPDATING"
        assert bench.updates.group == group
        body = StartWeightUpdate(version=1, parameters=[PARAMETER], attempt="guest")
        with pytest.raises(ProblemError, match="another group stands"):
            await bench.updates.start(body)
        assert bench.state == "UPDATING"
        await bench.init(attempt="second")  # a learner that comes again
        assert (await bench.updates.close_communicator("first")).state == "POISONED"
        assert bench.updates.group is not None
        await bench.updates.close_communicator("second")
        assert bench.updates.group is None
        await bench.init(attempt="guest", if_none=True)
        assert bench.updates.group is not None

    run(work())


@pytest.mark.req("SYNC-04", "DEP-03")
def test_who_asks_for_no_group_keeps_out_of_the_way_of_one_that_forms() -> None:
    async def work() -> None:
        bench = Bench()
        joining, may_join = asyncio.Event(), asyncio.Event()

        async def joins() -> None:
            joining.set()
            await may_join.wait()

        bench.engines[0].script["init_weight_transfer_engine"] = joins
        first = asyncio.ensure_future(bench.init(attempt="first"))
        await joining.wait()
        with pytest.raises(ProblemError, match="phase runs"):
            await bench.init(attempt="guest", if_none=True)
        closing = asyncio.ensure_future(bench.updates.close_communicator("guest"))
        may_join.set()
        await first
        await closing
        assert bench.updates.group is not None

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
        await bench.start(1)
        bench.engines.lost = {0}
        with pytest.raises(ProblemError, match="an engine is gone"):
            await bench.updates.receive(UpdateWeights(version=1))
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
            await bench.start(1)
        assert bench.state == "READY"
        assert bench.engines[0].calls[-1] == "resume"

    run(work())


@pytest.mark.req("SRV-05", "SYNC-04")
def test_the_loss_of_one_engine_does_not_wait_for_another_that_hangs() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=60.0)
        hang = Hang()
        bench.engines[0].script["receive_weights"] = hang
        bench.engines[1].script["receive_weights"] = fails(EngineDead("replica 1 is dead"))
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


@pytest.mark.req("SYNC-05", "SYNC-07")
def test_a_version_comes_again_to_a_replica_that_does_not_have_it_or_to_a_mixture() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.push(3)
        bench.engines[1].weights_version = 0
        with pytest.raises(ProblemError, match="does not come after"):
            await bench.push(2)
        await bench.push(3)
        assert [engine.weights_version for engine in bench.engines] == [3, 3]
        with pytest.raises(ProblemError, match="does not come after"):
            await bench.push(3)
        bench.engines[0].script["receive_weights"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError, match="broke"):
            await bench.push(4)
        del bench.engines[0].script["receive_weights"]
        await bench.init()
        await bench.push(3)
        assert (bench.state, bench.updates.version) == ("READY", 3)

    run(work())


@pytest.mark.req("SYNC-05")
def test_what_a_checkpoint_starts_with_is_never_pushed() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[0].script["receive_weights"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError, match="broke"):
            await bench.push(1)
        await bench.init()
        with pytest.raises(ProblemError, match="does not come after the server's, 0"):
            await bench.push(0)

    run(work())


# --- the manifest and the comparison


FAULT = {"name": "a", "kind": "missing", "detail": "1 of 2 elements are filled"}


@pytest.mark.req("SYNC-05")
def test_a_manifest_that_does_not_fit_takes_the_start_back() -> None:
    async def work() -> None:
        bench = Bench(tensor_parallel_size=2)
        await bench.init()
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

    run(work())


@pytest.mark.req("SYNC-05")
def test_a_manifest_that_does_not_fit_leaves_a_poisoned_server_paused() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[0].script["complete_load"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError):
            await bench.push(1)
        bench.engines[0].script = {"open_weight_update": answers([FAULT] * 2)}
        with pytest.raises(ProblemError, match="1 fault"):
            await bench.start(1)
        assert bench.state == "POISONED"
        assert all("resume" not in engine.calls for engine in bench.engines)

    run(work())


@pytest.mark.req("SYNC-05")
def test_a_start_that_cannot_be_taken_back_poisons() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[0].script["open_weight_update"] = answers([FAULT])
        bench.engines[1].script["abandon_weight_update"] = fails(WeightPhaseFailed("no"))
        with pytest.raises(ProblemError) as caught:
            await bench.start(1)
        assert caught.value.problem.where.startswith("start: undo at")
        assert bench.state == "POISONED"

    run(work())


@pytest.mark.req("SYNC-06", "SYNC-05")
def test_weights_that_are_not_those_that_were_sent_poison_before_any_cache_is_reset() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[1].script["read_back"] = answers([[("m", 0, 0, 2, 1, 8)]])
        with pytest.raises(ProblemError) as caught:
            await bench.push(1)
        problem = caught.value.problem
        assert (problem.status, problem.kind) == (502, "weights-differ")
        assert problem.where.startswith("verify at 127.0.0.1:")
        detail = f"{7:016x} was sent, {8:016x} is held"
        assert problem.errors == [{"where": "a", "replica": 1, "detail": detail}]
        assert (bench.state, bench.updates.version) == ("POISONED", 0)
        for engine in bench.engines:
            assert not {"publish 1", "resume"} & set(engine.calls)

    run(work())


def over_base(digest: ParameterDigest = DIGEST) -> StartWeightUpdate:
    """An adapter, and the base it is for."""
    return StartWeightUpdate(
        version=1,
        parameters=[PARAMETER],
        adapter=AdapterMeta(r=1, lora_alpha=1, target_modules=["q"]),
        base=AdapterBase(parameters=[PARAMETER], digests=[digest]),
    )


@pytest.mark.req("SYNC-01", "SYNC-06")
def test_an_adapter_begins_after_its_base_was_compared_on_every_engine() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.updates.start(over_base())
        begun = ["pause", "adapter_faults", "check_base", "open_adapter_update"]
        assert all(engine.calls[1:] == begun for engine in bench.engines)
        assert bench.state == "UPDATING"

    run(work())


@pytest.mark.req("SYNC-01", "SYNC-06")
@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (([], [[("m", 0, 0, 2, 1, 8)]]), f"a: replica 1: {7:016x} was sent, {8:016x} is held"),
        (([FAULT], []), f"{FAULT['name']}: {FAULT['detail']}"),
    ],
    ids=["values", "manifest"],
)
def test_an_adapter_of_another_base_is_refused_and_changes_nothing(answer: Any, found: str) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
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

    run(work())


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize(
    "body",
    [
        over_base().model_copy(update={"adapter": None}),
        over_base(DIGEST.model_copy(update={"name": "b"})),
        over_base(DIGEST.model_copy(update={"columns": [1]})),
    ],
    ids=["no adapter", "unknown digest", "columns"],
)
def test_a_base_that_makes_no_sense_is_refused_before_anything(body: StartWeightUpdate) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        with pytest.raises(ProblemError) as caught:
            await bench.updates.start(body)
        assert (caught.value.problem.kind, caught.value.problem.where) == (
            "invalid-request",
            "base",
        )
        assert bench.state == "READY"
        assert all("pause" not in engine.calls for engine in bench.engines)

    run(work())


@pytest.mark.req("SYNC-04", "SYNC-06")
def test_a_comparison_that_hangs_is_given_up_and_the_learner_is_not_blamed() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init(timeout_s=0.2)
        bench.engines[0].script["read_back"] = hangs
        with pytest.raises(ProblemError) as caught:
            await bench.push(1)
        assert caught.value.problem.kind == "weight-transfer-timeout"
        assert caught.value.problem.detail.startswith("server:")
        assert caught.value.problem.where.startswith("verify at")
        assert bench.state == "POISONED"

    run(work())


@pytest.mark.req("SYNC-06")
def test_digests_of_what_is_not_in_the_manifest_are_refused_and_the_update_goes_on() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        await bench.start(1)
        await bench.updates.receive(UpdateWeights(version=1))
        for digests, complaint in (
            ([DIGEST.model_copy(update={"name": "b"})], "b is not in the manifest"),
            ([DIGEST, DIGEST], "two digests"),
            ([DIGEST.model_copy(update={"columns": [1]})], "a has 1 column"),
            ([DIGEST.model_copy(update={"columns": []})], "ascending"),
        ):
            with pytest.raises(ProblemError, match=complaint) as caught:
                await bench.updates.finish(FinishWeightUpdate(version=1, digests=digests))
            assert caught.value.problem.status == 422
        report = await bench.updates.finish(FinishWeightUpdate(version=1, digests=[DIGEST]))
        assert report.status.state == "READY"

    run(work())


@pytest.mark.req("SYNC-10")
def test_a_report_has_the_seconds_of_the_slowest_worker_and_what_was_compared() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.init()
        bench.engines[1].script["receive_weights"] = answers(
            {"transfer": 0.5, "load": 3.0}, {"transfer": 5.0, "load": 1.0}
        )
        report = await bench.push(1)
        assert set(report.seconds) == {"pause", "transfer", "load", "verify", "caches"}
        assert (report.seconds["transfer"], report.seconds["load"]) == (5.0, 7.0)
        assert (report.bytes, report.verified) == (8, 1)
        await bench.start(2)
        await bench.updates.receive(UpdateWeights(version=2))
        unverified = await bench.updates.finish(FinishWeightUpdate(version=2))
        assert unverified.verified == 0
        assert "read_back" not in bench.engines[0].calls[-5:]

    run(work())
