"""A worker that breaks in a transfer: the learner and the other workers end with it."""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learner.rollout.server_process import free_ports
from learner.rollout.sync.transports import join_group
from rollout_server.engines.vllm.weight_engines import (
    GlooInitInfo,
    GlooUpdateInfo,
    GlooWeightTransferEngine,
    IpcWeightTransferEngine,
)
from rollout_server.weights.weight_group import open_group_store
from shared_contracts.weights import InitCommunicator, Transport
from tests.contract.weight_sender import BUCKET_BYTES, Weights, manifest

# Nobody may need the first; the second is when this test gives up.
TIMEOUT_S, PATIENCE_S = 60.0, 30.0

ENGINES: dict[Transport, type[GlooWeightTransferEngine]] = {
    "gloo": GlooWeightTransferEngine,
    "ipc": IpcWeightTransferEngine,
}


class Model(nn.Module):
    """Refuses the parameter `refused`."""

    def __init__(self, refused: str | None) -> None:
        super().__init__()
        self._refused = refused

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, _ in weights:
            if name == self._refused:
                raise ValueError("too wide")


def received(
    engine: GlooWeightTransferEngine, init: GlooInitInfo, update: GlooUpdateInfo
) -> str | None:
    """Why it broke, as text, like `worker_extension` keeps it."""
    engine.init_transfer_engine(init)
    try:
        engine.receive_weights(update)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
@pytest.mark.parametrize("refused", ["w0", "w3"])
def test_a_worker_that_refuses_a_bucket_ends_all_ranks(transport: Transport, refused: str) -> None:
    """More buckets are to come."""
    weights: Weights = {f"w{i}": torch.full((BUCKET_BYTES // 8,), float(i)) for i in range(12)}
    update = GlooUpdateInfo([p.model_dump() for p in manifest(weights)])
    (port,) = free_ports(1)
    body = InitCommunicator(
        host="127.0.0.1",
        port=port,
        world_size=3,
        attempt="",
        transport=transport,
        bucket_bytes=BUCKET_BYTES,
        timeout_s=TIMEOUT_S,
    )
    store = open_group_store("127.0.0.1", port, TIMEOUT_S)
    threads = ThreadPoolExecutor(3)
    config: Any = None
    engines, workers = [], []
    for rank, refuses in ((1, refused), (2, None)):
        vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0), model_config=None
        )
        engine = ENGINES[transport](config, vllm_config, torch.device("cpu"), Model(refuses))
        engines.append(engine)  # lives on, as in a worker
        init = GlooInitInfo("127.0.0.1", port, rank, 3, BUCKET_BYTES, TIMEOUT_S)
        workers.append(threads.submit(received, engine, init, update))
    group = join_group(body, threading.Event())
    sending = threads.submit(group.send, manifest(weights), iter(weights.items()))
    reasons = [worker.result(PATIENCE_S) for worker in workers]
    assert isinstance(sending.exception(PATIENCE_S), RuntimeError)
    assert reasons[0] == f"{refused} cannot be loaded: ValueError: too wide"
    assert reasons[1] is not None
    threads.shutdown()
    del store
