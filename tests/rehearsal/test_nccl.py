"""Pushes over NCCL without a GPU: our sender and vLLM's receiver, over a faked communicator."""

import asyncio
import base64
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from learner.rollout.parallel_calls import Calls
from learner.rollout.server_process import free_ports
from learner.rollout.sync.transports import CurrentGpu, WeightGroup, join_group
from rollout_server.engines.engine_protocol import WeightPhaseFailed
from rollout_server.engines.vllm.weight_engines import init_info, update_info
from rollout_server.weights.weight_updates import WeightUpdates
from shared_contracts.errors import ProblemError
from shared_contracts.rendezvous import Rendezvous, RendezvousGivenUp
from shared_contracts.weights import InitCommunicator, ParameterMeta
from tests.contract.update_bench import Hang, ScriptedEngine, ScriptedEngines, asynchronous
from tests.rehearsal.fake_nccl import NEVER_S, Nccl, install

pytestmark = pytest.mark.slow

# The deadline of a rendezvous that fails.
SHORT_S = 1.0


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nccl]:
    made = Nccl()
    install(monkeypatch, made)
    yield made
    made.release(over=True)


class WorkerEngine(ScriptedEngine):
    """An engine of one worker: vLLM's own weight engine as we use it, in the worker's one thread.

    found: the weights of its model.
    """

    def __init__(self) -> None:
        from rollout_server.engines.vllm.nccl_engine import NcclEngine

        super().__init__()
        self.found: dict[str, Tensor] = {}
        self._worker = ThreadPoolExecutor(1)
        engine: Any = NcclEngine.__new__(NcclEngine)
        engine.model, engine.device, engine.model_update_group = self, torch.device("cpu"), None
        engine.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        self.transfer = engine

    def load_weights(self, weights: Any) -> None:
        self.found.update((name, tensor.clone()) for name, tensor in weights)

    async def weight_phase(self, name: str, **arguments: Any) -> list[Any]:
        scripted = await super().weight_phase(name, **arguments)
        phases: dict[str, Callable[[], None]] = {
            "join_group": lambda: self.join(
                InitCommunicator.model_validate(arguments["init"]), arguments["rank_offset"]
            ),
            "leave_group": self.transfer.shutdown,
        }
        if name in phases:
            try:
                await asyncio.wrap_future(self._worker.submit(phases[name]))
            except RuntimeError as error:
                raise WeightPhaseFailed(f"worker 0: {type(error).__name__}: {error}") from error
        return scripted

    def join(self, body: InitCommunicator, rank: int) -> None:
        info = self.transfer.parse_init_info(init_info(body, "nccl", rank))
        self.transfer.init_transfer_engine(info)

    def receive(self, described: list[ParameterMeta]) -> None:
        info = update_info("nccl", [each.model_dump() for each in described])
        self.transfer.receive_weights(self.transfer.parse_update_info(info))

    async def answers(self) -> bool:
        """Ends when the worker's thread is free."""
        return await asyncio.wrap_future(self._worker.submit(lambda: True))


class Server:
    """The real weight group and updates over engines of one worker each, and the real learner."""

    def __init__(self, nccl: Nccl, engines: int = 1, gone_after_s: float = NEVER_S) -> None:
        nccl.world_size = 1 + engines
        self.engines = ScriptedEngines()
        self.engines[:] = [WorkerEngine() for _ in range(engines)]
        self.updates = WeightUpdates(
            self.engines, 1, "nccl", lambda: "epoch", NEVER_S, gone_after_s=gone_after_s
        )
        self.given_up = threading.Event()

    def worker(self, index: int = 0) -> WorkerEngine:
        return cast(WorkerEngine, self.engines[index])

    def body(self, timeout_s: float) -> InitCommunicator:
        return InitCommunicator(
            host="127.0.0.1",
            port=free_ports(1)[0],
            world_size=1 + len(self.engines),
            transport="nccl",
            bucket_bytes=1000,
            nccl_unique_id=base64.b64encode(os.urandom(128)).decode(),
            attempt="a",
            timeout_s=timeout_s,
        )

    def join(self, body: InitCommunicator) -> "Future[WeightGroup]":
        """The learner joins, as a pusher does: in a thread, on the pusher's GPU."""
        calls: Calls[None, WeightGroup] = Calls()
        calls.start(None, CurrentGpu().used_by(partial(join_group, body, self.given_up)))
        return in_a_thread(lambda: calls.take(2 * NEVER_S)[1].result())

    async def meet(self) -> WeightGroup:
        body = self.body(NEVER_S)
        joining = self.join(body)
        await self.updates.init_communicator(body)
        return await asyncio.wrap_future(joining)

    async def fails(self, timeout_s: float) -> tuple[ProblemError, BaseException]:
        """The errors of server and learner after a rendezvous that fails."""
        body = self.body(timeout_s)
        joining = self.join(body)
        with pytest.raises(ProblemError) as caught:
            await self.updates.init_communicator(body)
        assert self.updates.group.formed is None
        self.given_up.set()  # as the learner does when its call was refused
        with pytest.raises(RuntimeError) as raised:
            await asyncio.wait_for(asyncio.wrap_future(joining), NEVER_S)
        self.given_up.clear()
        return caught.value, raised.value

    async def all_serve(self) -> None:
        """No engine was given up or paused, and each worker is free."""
        for index, engine in enumerate(self.engines):
            assert not engine.given_up
            assert set(engine.calls) <= {"join_group", "leave_group"}
            assert await asyncio.wait_for(self.worker(index).answers(), NEVER_S)
        assert self.updates.state == "READY"

    async def push(self, group: WeightGroup) -> None:
        """A push over `group` brings every worker all weights."""
        weights = random_weights(200)
        described = parameters_of(weights)
        receiving = [
            asyncio.create_task(asyncio.to_thread(self.worker(i).receive, described))
            for i in range(len(self.engines))
        ]
        await asyncio.to_thread(group.send, described, iter(weights.items()))
        await asyncio.gather(*receiving)
        for index in range(len(self.engines)):
            found = self.worker(index).found
            assert found.keys() == weights.keys()
            assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def in_a_thread(call: Callable[[], Any]) -> "Future[Any]":
    """In a daemon, which may hang when the test has ended."""
    outcome: Future[Any] = Future()

    def settle() -> None:
        try:
            outcome.set_result(call())
        except RuntimeError as error:
            outcome.set_exception(error)

    threading.Thread(target=settle, daemon=True).start()
    return outcome


def parameters_of(weights: dict[str, Tensor]) -> list[ParameterMeta]:
    return [
        ParameterMeta(name=name, dtype="bfloat16", shape=list(weight.shape))
        for name, weight in weights.items()
    ]


def random_weights(count: int) -> dict[str, Tensor]:
    shapes = [(i % 7 + 1, i % 13 + 1) for i in range(count)]
    return {f"p{i}": torch.randn(shape).to(torch.bfloat16) for i, shape in enumerate(shapes)}


@pytest.mark.req("SYNC-03", "FULL-07", "FULL-10")
@asynchronous
async def test_vllms_receivers_get_what_our_sender_sends(nccl: Nccl) -> None:
    server = Server(nccl, engines=3)
    group = await server.meet()
    assert sorted(rank for rank, _ in nccl.entered) == [0, 1, 2, 3]
    assert {device for _, device in nccl.entered} == {"cpu"}, "of no thread that is new"
    await server.push(group)
    assert nccl.buckets > 5


@pytest.mark.req("FULL-07", "SYNC-04")
@pytest.mark.parametrize(
    "fault", ["a worker is missing", "NCCL hangs", "the learner fails", "a worker fails"]
)
@asynchronous
async def test_a_rendezvous_that_fails_holds_no_engine_and_the_next_group_works(
    nccl: Nccl, fault: str
) -> None:
    """Where a rank fails inside NCCL, the others end before the deadline, which is NEVER_S."""
    server = Server(nccl, engines=2)
    if fault == "a worker is missing":
        server.engines[1].script["join_group"] = Hang()
        expected = "engine worker (rank 2): missing for 1 s"
    elif fault == "NCCL hangs":
        nccl.hangs = True
        expected = "NCCL has not joined all ranks within 1 s"
    else:
        nccl.dies = 0 if fault == "the learner fails" else 2
        expected = "NCCL error: unhandled system error"
    problem, error = await server.fails(SHORT_S if nccl.dies is None else NEVER_S)
    assert expected in str(problem)
    if fault == "a worker is missing":
        assert expected in str(error)
        assert "rank 1)" not in str(error)
        assert nccl.entered == []
    elif fault == "NCCL hangs":
        assert "gave up" in str(error) or "NCCL has not joined" in str(error)
        assert len(nccl.entered) == 3
    else:
        assert ("learner (rank 0)" if nccl.dies == 0 else "worker 0") in str(problem)
    assert problem.problem.status == (504 if nccl.dies is None else 502)
    await server.all_serve()

    server.engines[1].script.clear()
    nccl.hangs, nccl.dies, late = False, None, list(nccl.made)
    group = await server.meet()
    nccl.release()  # calls that were left behind come to an end
    for communicator in late if fault == "NCCL hangs" else []:
        assert await asyncio.to_thread(communicator.destroyed.wait, NEVER_S)
    await server.push(group)
    assert not any(each.destroyed.is_set() for each in nccl.made[len(late) :])


@pytest.mark.req("FULL-07", "SYNC-04")
def test_a_worker_that_cannot_load_nccl_is_never_ready(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other rank enters NCCL, where it would wait for that worker without a deadline."""
    import rollout_server.engines.vllm.nccl_engine as worker

    def missing() -> None:
        raise RuntimeError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(worker, "NCCLLibrary", missing)
    server = Server(nccl)
    problem, _ = asyncio.run(server.fails(NEVER_S))
    assert "libnccl.so.2: cannot open shared object file" in str(problem)
    assert nccl.entered == []


@pytest.mark.req("FULL-07", "SYNC-04", "SYNC-07")
@asynchronous
async def test_a_learner_that_falls_silent_inside_nccl_frees_the_engines(nccl: Nccl) -> None:
    server = Server(nccl, engines=2, gone_after_s=SHORT_S)
    nccl.hangs = True
    problem, _ = await server.fails(NEVER_S)
    assert "no heartbeat for 1 s" in str(problem)
    await server.all_serve()


@pytest.mark.req("FULL-07", "SYNC-03", "SYNC-04")
@asynchronous
async def test_after_a_send_that_breaks_or_hangs_a_new_group_brings_all_weights(
    nccl: Nccl,
) -> None:
    server = Server(nccl)
    group = await server.meet()
    nccl.broken_at = 2
    with pytest.raises(RuntimeError, match="NCCL error: remote process exited"):
        await server.push(group)
    group.abandon()
    nccl.broken_at, nccl.stuck = None, True
    again = await server.meet()
    assert nccl.made[1].destroyed.is_set(), "the worker has left the group that broke"
    weights = random_weights(20)
    sending = in_a_thread(lambda: again.send(parameters_of(weights), iter(weights.items())))
    assert await asyncio.to_thread(nccl.sending.wait, NEVER_S)
    assert not sending.done()
    again.abandon()
    assert isinstance(await asyncio.to_thread(sending.exception, NEVER_S), RuntimeError)
    nccl.stuck = False
    await server.push(await server.meet())


@pytest.mark.req("FULL-07")
def test_a_rank_that_comes_after_another_gave_up_does_not_call_nccl() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    entered: list[int] = []

    def meet(rank: int, timeout_s: float) -> "Future[Any]":
        """With a connection of its own."""
        connection = TCPStore(
            "127.0.0.1",
            store.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=NEVER_S),
        )
        rendezvous = Rendezvous(
            connection, rank, 3, timeout_s, lambda: entered.append(rank), lambda _: None
        )
        return in_a_thread(rendezvous.meet)

    with pytest.raises(RendezvousGivenUp, match=r"worker \(rank 1\), .*worker \(rank 2\): missing"):
        meet(0, 0.2).result(NEVER_S)
    for rank in (1, 2):
        with pytest.raises(RendezvousGivenUp, match=r"rank 2\): missing for 0.2 s"):
            meet(rank, NEVER_S).result(NEVER_S)
    assert entered == []
