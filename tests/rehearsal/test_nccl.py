"""Pushes over NCCL without a GPU: our sender and vLLM's receiver, over a faked communicator."""

import asyncio
import base64
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
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
from tests.contract.update_bench import Hang, ScriptedEngine, ScriptedEngines
from tests.rehearsal.fake_nccl import NEVER_S, Nccl, install

# A rendezvous that comes to an end does so in far less, and one that does not lasts as long.
SHORT_S = 1.0
# So long after the deadline of a rendezvous all engines answer again.
AGAIN_S = 5.0


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 2 * NEVER_S))


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nccl]:
    made = Nccl()
    install(monkeypatch, made)
    yield made
    made.release(over=True)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class WorkerEngine(ScriptedEngine):
    """An engine of one worker: vLLM's own weight engine as we use it, in the worker's one thread.

    found: what its model was given.
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
        told = self.transfer.parse_init_info(init_info(body, "nccl", rank))
        self.transfer.init_transfer_engine(told)

    def receive(self, described: list[ParameterMeta]) -> None:
        told = update_info("nccl", [each.model_dump() for each in described])
        self.transfer.receive_weights(self.transfer.parse_update_info(told))

    async def answers(self) -> bool:
        """Whether the worker's thread is free, or soon."""
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

    def comes(self, body: InitCommunicator) -> "Future[WeightGroup]":
        """The learner joins, as a pusher does: in a thread, on the pusher's GPU."""
        coming: Calls[None, WeightGroup] = Calls()
        joins = partial(join_group, body, self.given_up)
        coming.start(None, CurrentGpu().used_by(joins))
        outcome: Future[WeightGroup] = Future()

        def settle() -> None:
            _, ended = coming.take(2 * NEVER_S)
            if (error := ended.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(ended.result())

        threading.Thread(target=settle, daemon=True).start()
        return outcome

    async def meet(self, timeout_s: float = NEVER_S) -> WeightGroup:
        body = self.body(timeout_s)
        coming = self.comes(body)
        await self.updates.init_communicator(body)
        return await asyncio.wrap_future(coming)

    async def fails(self, timeout_s: float) -> tuple[ProblemError, BaseException]:
        """What the server and the learner say of a rendezvous that fails."""
        body = self.body(timeout_s)
        coming = self.comes(body)
        with pytest.raises(ProblemError) as caught:
            await self.updates.init_communicator(body)
        assert self.updates.group.formed is None
        self.given_up.set()  # as the learner does when its call was refused
        with pytest.raises(RuntimeError) as said:
            await asyncio.wait_for(asyncio.wrap_future(coming), NEVER_S)
        self.given_up.clear()
        return caught.value, said.value

    async def all_serve(self) -> None:
        """No engine is held or was given up, and what it served before it serves now."""
        assert not any(engine.given_up for engine in self.engines)
        for index in range(len(self.engines)):
            assert await asyncio.wait_for(self.worker(index).answers(), NEVER_S)
        assert self.updates.state == "READY"

    async def pushes(self, group: WeightGroup) -> None:
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


def parameters_of(weights: dict[str, Tensor]) -> list[ParameterMeta]:
    return [
        ParameterMeta(name=name, dtype="bfloat16", shape=list(weight.shape))
        for name, weight in weights.items()
    ]


def random_weights(count: int) -> dict[str, Tensor]:
    shapes = [(i % 7 + 1, i % 13 + 1) for i in range(count)]
    return {f"p{i}": torch.randn(shape).to(torch.bfloat16) for i, shape in enumerate(shapes)}


@pytest.mark.req("SYNC-03", "FULL-07", "FULL-10")
def test_vllms_receivers_get_what_our_sender_sends(nccl: Nccl) -> None:
    async def work() -> None:
        server = Server(nccl, engines=3)
        group = await server.meet()
        assert sorted(rank for rank, _ in nccl.entered) == [0, 1, 2, 3]
        assert {device for _, device in nccl.entered} == {"cpu"}, "of no thread that is new"
        await server.pushes(group)
        assert nccl.buckets > 5

    run(work())


@pytest.mark.req("FULL-07", "SYNC-04")
def test_no_engine_is_held_when_the_learner_does_not_come(nccl: Nccl) -> None:
    async def work() -> None:
        server = Server(nccl, engines=2)
        with pytest.raises(ProblemError, match=r"learner \(rank 0\): missing for 0.3 s") as caught:
            await server.updates.init_communicator(server.body(0.3))
        assert caught.value.problem.status == 504
        assert [engine.inits for engine in server.engines] == [[], []]
        await server.all_serve()
        await server.pushes(await server.meet())

    run(work())


@pytest.mark.req("FULL-07", "SYNC-04")
def test_no_rank_calls_nccl_when_a_worker_does_not_come(nccl: Nccl) -> None:
    async def work() -> None:
        server = Server(nccl, engines=2)
        server.engines[1].script["join_group"] = Hang()
        problem, said = await server.fails(SHORT_S)
        for text in (str(problem), str(said)):
            assert r"engine worker (rank 2): missing for 1 s" in text
            assert "rank 1)" not in text
        assert problem.problem.status == 504
        assert nccl.entered == []
        server.engines[1].script.clear()
        await server.all_serve()
        await server.pushes(await server.meet())

    run(work())


@pytest.mark.req("FULL-07", "SYNC-04")
def test_a_rendezvous_that_hangs_inside_nccl_holds_no_engine(nccl: Nccl) -> None:
    async def work() -> None:
        server = Server(nccl, engines=2)
        nccl.hangs = True
        problem, said = await server.fails(SHORT_S)
        assert "NCCL has not joined all ranks within 1 s" in str(problem)
        assert problem.problem.status == 504
        assert "gave up" in str(said) or "NCCL has not joined" in str(said)
        assert len(nccl.entered) == 3
        await server.all_serve()
        nccl.hangs, late = False, list(nccl.made)
        group = await server.meet()
        nccl.release()  # the calls that were left behind come to an end
        for communicator in late:
            assert await asyncio.to_thread(communicator.destroyed.wait, NEVER_S)
        await server.pushes(group)
        assert not any(each.destroyed.is_set() for each in nccl.made[3:])

    run(work())


@pytest.mark.req("FULL-07", "SYNC-04")
@pytest.mark.parametrize(("dead", "named"), [(0, "learner (rank 0)"), (2, "worker 0")])
def test_a_rank_that_fails_inside_nccl_frees_the_others_at_once(
    nccl: Nccl, dead: int, named: str
) -> None:
    async def work() -> None:
        server = Server(nccl, engines=2)
        nccl.dies = dead
        problem, _ = await server.fails(NEVER_S)
        assert named in str(problem)
        assert "NCCL error: unhandled system error" in str(problem)
        nccl.dies = None
        await server.all_serve()
        nccl.release()
        await server.pushes(await server.meet())

    run(work())


@pytest.mark.req("FULL-07", "SYNC-04")
@pytest.mark.parametrize("why", ["hangs inside NCCL", "a worker is missing", "a rank dies"])
def test_engines_answer_again_soon_after_the_deadline(
    nccl: Nccl, why: str, record_property: Callable[[str, object], None]
) -> None:
    """With the margins of a server. A rank that dies frees the others before the deadline."""

    async def work() -> None:
        server = Server(nccl, engines=2)
        before = list(server.engines)
        deadline_s = SHORT_S
        if why == "a rank dies":
            nccl.dies, deadline_s = 2, 0.0
        elif why == "a worker is missing":
            server.engines[1].script["join_group"] = Hang()
        else:
            nccl.hangs = True
        began = time.monotonic()
        await server.fails(deadline_s or NEVER_S)
        server.engines[1].script.clear()
        await server.all_serve()
        late_s = time.monotonic() - began - deadline_s
        record_property("seconds until all engines serve", round(late_s, 2))
        print(f"{why}: all engines serve {late_s:.2f} s after the deadline")
        assert late_s < AGAIN_S
        assert list(server.engines) == before, "none was built again"
        done = {call for engine in server.engines for call in engine.calls}
        assert done == {"join_group", "leave_group"}, "none was paused"

    run(work())


@pytest.mark.req("FULL-07", "SYNC-04")
def test_a_worker_that_cannot_load_nccl_is_never_ready(
    nccl: Nccl, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no other rank enters NCCL, where it would wait for that worker without a deadline."""
    import rollout_server.engines.vllm.nccl_engine as worker

    def missing() -> None:
        raise RuntimeError("libnccl.so.2: cannot open shared object file")

    async def work() -> None:
        server = Server(nccl)
        monkeypatch.setattr(worker, "NCCLLibrary", missing)
        body = server.body(SHORT_S).model_copy(update={"port": store.port})
        with pytest.raises(RuntimeError, match="cannot open shared object file"):
            server.worker().join(body, 1)
        assert not store.check(["ready/1"])
        problem, _ = await server.fails(NEVER_S)
        assert "libnccl.so.2: cannot open shared object file" in str(problem)
        assert nccl.entered == []
        await server.all_serve()
        monkeypatch.setattr(worker, "NCCLLibrary", object)
        await server.pushes(await server.meet())

    run(work())


@pytest.mark.req("FULL-07", "SYNC-04", "SYNC-07")
@pytest.mark.parametrize("inside", [True, False])
def test_a_learner_that_falls_silent_in_a_rendezvous_frees_the_engines(
    nccl: Nccl, inside: bool
) -> None:
    """inside: of NCCL; else a worker is missing, which the others wait for at the store."""

    async def work() -> None:
        server = Server(nccl, engines=2, gone_after_s=SHORT_S)
        nccl.hangs = True
        if not inside:
            server.engines[1].script["join_group"] = Hang()
        problem, _ = await server.fails(NEVER_S)
        assert "no heartbeat for 1 s" in str(problem)
        assert bool(nccl.entered) == inside
        await server.all_serve()

    run(work())


@pytest.mark.req("FULL-07", "SYNC-04")
def test_after_a_broadcast_that_aborts_a_new_group_brings_all_weights(nccl: Nccl) -> None:
    async def work() -> None:
        server = Server(nccl)
        group = await server.meet()
        nccl.broken_at = 2
        with pytest.raises(RuntimeError, match="NCCL error: remote process exited"):
            await server.pushes(group)
        group.abandon()
        nccl.broken_at = None
        again = await server.meet()
        assert nccl.made[1].destroyed.is_set(), "the worker has left the group that broke"
        await server.pushes(again)

    run(work())


@pytest.mark.req("SYNC-03", "SYNC-04")
def test_a_send_that_hangs_ends_when_the_group_is_abandoned(nccl: Nccl) -> None:
    async def work() -> None:
        server = Server(nccl)
        group = await server.meet()
        nccl.stuck = True
        weights = random_weights(20)
        sends = partial(group.send, parameters_of(weights), iter(weights.items()))
        sending = asyncio.create_task(asyncio.to_thread(sends))
        done, _ = await asyncio.wait([sending], timeout=0.2)
        assert not done
        group.abandon()
        with pytest.raises(RuntimeError, match="NCCL error"):
            await asyncio.wait_for(sending, NEVER_S)

    run(work())


# --- the ranks at their store


class Ranks:
    """Ranks of a group of three, each in a thread with a connection of its own."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self.entered: list[int] = []
        self._all = threading.Barrier(3)

    def come(self, rank: int, timeout_s: float = NEVER_S) -> "Future[int]":
        def enter() -> int:
            self.entered.append(rank)
            self._all.wait(NEVER_S)
            return rank

        def meet() -> int:
            timeout = timedelta(seconds=NEVER_S)
            port = self._store.port
            connection = TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout
            )
            left = Rendezvous(connection, rank, 3, timeout_s, enter, lambda _: None)
            return left.meet()

        outcome: Future[int] = Future()

        def settle() -> None:
            try:
                outcome.set_result(meet())
            except RuntimeError as error:
                outcome.set_exception(error)

        threading.Thread(target=settle, daemon=True).start()
        return outcome


@pytest.mark.req("FULL-07")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_ranks_meet_in_whatever_order_they_come(
    store: TCPStore, order: tuple[int, int, int]
) -> None:
    ranks = Ranks(store)
    coming = []
    for count, rank in enumerate(order, start=1):
        coming.append(ranks.come(rank))
        if count < len(order):
            until(lambda count=count: store.num_keys() == count)  # type: ignore[misc]
            assert ranks.entered == []
    assert [each.result(NEVER_S) for each in coming] == list(order)


@pytest.mark.req("FULL-07")
def test_a_rank_that_comes_after_another_gave_up_does_not_call_nccl(store: TCPStore) -> None:
    ranks = Ranks(store)
    first = ranks.come(0, timeout_s=0.2)
    with pytest.raises(RendezvousGivenUp, match=r"worker \(rank 1\), .*worker \(rank 2\): missing"):
        first.result(NEVER_S)
    for rank in (1, 2):
        with pytest.raises(RendezvousGivenUp, match=r"rank 2\): missing for 0.2 s"):
            ranks.come(rank).result(NEVER_S)
    assert ranks.entered == []


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + NEVER_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
