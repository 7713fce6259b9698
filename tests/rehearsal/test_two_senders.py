"""Two colocated processes (threads) push to the workers on their own, faked GPUs."""

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import learner.rollout.parallel_calls as threads
import learner.rollout.sync.group as sender
from learner.distributed.peers import Peers
from tests.rehearsal.fake_nccl import NEVER_S
from tests.rehearsal.test_nccl import MODEL, Server
from tests.unit.ranks_in_threads import in_ranks


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
