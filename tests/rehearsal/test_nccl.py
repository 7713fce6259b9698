"""Pushes over NCCL without a GPU: the learner's pusher, the server and its workers' plug-in.

Faked are vLLM around the plug-in, HTTP, and NCCL.
"""

import asyncio
import copy
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

import learner.rollout.parallel_calls as threads
import learner.rollout.sync.group as sender
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import WeightPusher, WeightSyncError
from learner.rollout.sync.weights import SyncMode
from rollout_server.weights.pushes import Pushes
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.weights import Transport
from tests.rehearsal.fake_nccl import ERROR, NEVER_S, install
from tests.unit.ranks_in_threads import in_ranks

# The deadline of a phase in which a rank hangs.
SHORT_S = 1.0

# Its parameters fill some buckets.
MODEL = nn.Sequential(*(nn.Linear(i % 7 + 1, i % 13 + 1) for i in range(50)))
WEIGHTS = dict(MODEL.named_parameters())


def built(index: int) -> Any:
    """Return an engine with one worker, of which only the plug-in is real."""
    from rollout_server.engines.vllm.engine import VllmEngine
    from rollout_server.engines.vllm.push_engine import GroupInfo, Manifest, PushEngine

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        llm.loaded = {name: tensor.clone() for name, tensor in weights}

    model: Any = SimpleNamespace(load_weights=load_weights)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(rank=0), model_config=None)
    plug_in = PushEngine(config, config, torch.device("cpu"), model)
    thread = ThreadPoolExecutor(1)

    async def work(call: Callable[..., None], *arguments: Any) -> None:
        await asyncio.wrap_future(thread.submit(call, *arguments))

    llm = AsyncMock(errored=False, model_config=SimpleNamespace(dtype="float32", max_model_len=8))
    join, receive = plug_in.init_transfer_engine, plug_in.receive_weights
    llm.init_weight_transfer_engine = lambda body: work(join, GroupInfo(**body.init_info))
    llm.update_weights = lambda body: work(receive, Manifest(**body.update_info))
    llm.shutdown_weight_transfer_engine = lambda: work(plug_in.shutdown)
    engine: Any = VllmEngine(llm, index, RepeatTerminateConfig())
    engine.llm = llm
    return engine


PHASES = "init_communicator", "start_weight_update", "update_weights", "finish_weight_update"


class Server:
    """The pushes of a server with two engines; one that was given up is built again."""

    def __init__(self, transport: Transport = "nccl") -> None:
        self.transport = transport
        shapes = {name: list(weight.shape) for name, weight in WEIGHTS.items()}
        self.engines = [built(0), built(1)]
        self.pushes = Pushes(self, 2, transport, lambda: "epoch", lambda: shapes, NEVER_S)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def all(self) -> list[Any]:
        self.engines = [e if e.alive else built(e.index) for e in self.engines]
        return self.engines

    def alive(self) -> list[Any]:
        return [engine for engine in self.engines if engine.alive]

    def pusher(
        self, timeout_s: float, model: nn.Module = MODEL, peers: Peers = SINGLE_PROCESS
    ) -> WeightPusher:
        def call(phase: str, body: Any) -> Any:
            answer = getattr(self.pushes, phase)(body)
            return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

        client: Any = SimpleNamespace(base_url="http://127.0.0.1:1", timeout_s=timeout_s)
        client.world_size = lambda: 2
        for phase in PHASES:
            setattr(client, phase, partial(call, phase))
        (port,) = free_ports(1)
        mode = SyncMode.of(model, "full", fallback_to_full=True)
        return WeightPusher(client, port, mode, self.transport, bucket_bytes=1000, peers=peers)

    def assert_pushed(self, version: int) -> None:
        for engine in self.engines:
            assert engine.weights_version == version
            assert list(engine.llm.loaded) == list(WEIGHTS)
            assert all(map(torch.equal, engine.llm.loaded.values(), WEIGHTS.values()))


@pytest.mark.slow
@pytest.mark.req("SYNC-03", "FULL-07", "FULL-10")
def test_every_worker_gets_what_the_learner_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake asserts what every rank does before NCCL."""
    server = Server()
    with install(monkeypatch) as nccl:
        pusher = server.pusher(NEVER_S)
        for version in (1, 2):
            pusher.push(version)
            server.assert_pushed(version)
    assert sorted(nccl.made) == [0, 1, 2], "one group for both pushes"


@pytest.mark.slow
@pytest.mark.req("FULL-07", "FULL-10", "SYNC-04", "SYNC-05")
@pytest.mark.parametrize(
    ("fault", "place", "reason"),
    [
        ("dies", (0, 2), f"learner .* in phase transfer: {ERROR}"),
        ("dies", (1, 1), f"server .* in phase transfer.*{ERROR}"),
        ("hangs", (0, 2), "server .* in phase transfer"),
        ("hangs", (2, 3), "server .* in phase transfer"),
        ("hangs", (1, 0), "server .* in phase rendezvous.* not over within 1 s"),
        ("hangs, and the learner leaves", (0, 2), "in phase transfer"),
    ],
)
def test_a_rank_that_fails_in_nccl_ends_the_push_and_the_next_one_succeeds(
    monkeypatch: pytest.MonkeyPatch, fault: str, place: tuple[int, int], reason: str
) -> None:
    """A failure is noticed long before the deadline, a rank that hangs at it."""
    server = Server()
    before = server.engines
    with install(monkeypatch) as nccl:
        setattr(nccl, "dies" if fault == "dies" else "hangs", place)
        pusher = server.pusher(SHORT_S if fault == "hangs" else NEVER_S)
        if "leaves" in fault:
            nccl.on_hang = staticmethod(pusher.abandon)
        with pytest.raises(WeightSyncError, match=reason):
            pusher.push(1)
    with install(monkeypatch):
        server.pusher(NEVER_S).push(1)
    server.assert_pushed(1)
    assert not any(engine.alive for engine in before), "they were built again"


@pytest.mark.slow
@pytest.mark.req("FULL-07", "SYNC-04")
@pytest.mark.parametrize(
    ("comes", "timeout_s", "reason"),
    [
        (False, SHORT_S, r"engine worker \(rank 2\): missing for 1 s"),
        (True, NEVER_S, "no CUDA-capable device"),
    ],
)
def test_no_rank_calls_nccl_before_all_have_met(
    monkeypatch: pytest.MonkeyPatch, comes: bool, timeout_s: float, reason: str
) -> None:
    server = Server()

    async def fail(request: Any) -> None:
        if not comes:
            await asyncio.Event().wait()
        host, port = map(request.init_info["group"].get, ("host", "port"))
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
        await asyncio.to_thread(store.wait, ["group/0/ready/1"])  # the other worker waits
        raise RuntimeError("no CUDA-capable device")

    last = server.engines[1].llm
    joins, last.init_weight_transfer_engine = last.init_weight_transfer_engine, fail
    with install(monkeypatch) as nccl:
        with pytest.raises(WeightSyncError, match=reason):
            server.pusher(timeout_s).push(1)
        assert nccl.made == []
        assert all(engine.alive for engine in server.engines)
        last.init_weight_transfer_engine = joins
        server.pusher(NEVER_S).push(1)
    server.assert_pushed(1)


@pytest.mark.slow
@pytest.mark.req("ROLL-03", "SYNC-03", "FULL-10")
def test_each_process_shares_memory_of_its_gpu_with_the_worker_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import rollout_server.engines.vllm.push_engine as receiver

    current, memory = threading.local(), list[tuple[int, Tensor]]()

    def reduce_tensor(data: Tensor) -> tuple[None, list[Any]]:
        memory.append((current.gpu, data))
        handle = b"%d" % (len(memory) - 1)
        return None, [0] * 7 + [handle, len(data), 0, 0, b"", 0, b"", False]

    def rebuild_cuda_tensor(*, storage_device: int, storage_handle: bytes, **_: Any) -> Tensor:
        gpu, data = memory[int(storage_handle)]
        assert storage_device == gpu, "the handle of another GPU"
        return data

    def of(device: int | torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{device if isinstance(device, int) else current.gpu}")

    cuda: dict[str, Any] = dict.fromkeys(("is_initialized", "is_available"), lambda: True)
    cuda |= {"current_device": lambda: current.gpu, "device_count": lambda: 2}
    cuda |= {"set_device": lambda gpu: setattr(current, "gpu", gpu), "get_device_properties": of}
    empty: Any = lambda *sizes, dtype, device="cpu": torch.empty(*sizes, dtype=dtype)  # noqa: E731
    faked = vars(torch) | {"cuda": SimpleNamespace(**cuda), "empty": empty}
    for module in (threads, sender, receiver):
        monkeypatch.setattr(module, "torch", SimpleNamespace(**faked))
    monkeypatch.setattr(sender, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(receiver, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    server, models = Server("ipc"), [MODEL, copy.deepcopy(MODEL)]
    models[1].load_state_dict({name: weight + 1 for name, weight in MODEL.state_dict().items()})

    def work(peers: Peers) -> None:
        current.gpu = peers.rank
        pusher = server.pusher(NEVER_S, models[peers.rank], peers)
        for version in (1, 2):
            assert pusher.push_together(version, "float32").status.weights_version == version

    for rank in in_ranks(2, work):
        rank.result()
    for engine, model in zip(server.engines, models, strict=True):
        loaded, sent = engine.llm.loaded, model.state_dict()
        assert all(torch.equal(loaded[name], sent[name]) for name in sent)
