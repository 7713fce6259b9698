"""The worker's end of the gloo transfer, with a model that only looks at what it is given."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learner.rollout.server_process import free_ports
from rollout_server.engines.vllm.weight_engines import (
    GlooInitInfo,
    GlooUpdateInfo,
    GlooWeightTransferEngine,
)
from rollout_server.weights.weight_group import open_group_store
from tests.contract.weight_sender import BUCKET_BYTES, Sender, Weights, manifest

TIMEOUT_S = 20.0


class Model(nn.Module):
    def __init__(self, look: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._look = look

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self._look(name, weight)


class Ends:
    """Both ends of a group; a bucket takes two of the parameters of `weights`."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.seen: list[str] = []
        self.weights: Weights = {
            f"w{i}": torch.full((BUCKET_BYTES // 10,), float(i)) for i in range(7)
        }
        self.update = GlooUpdateInfo([p.model_dump() for p in manifest(self.weights)])
        self.look: Callable[[str, Tensor], None] = lambda name, weight: self.seen.append(name)
        model = Model(lambda name, weight: self.look(name, weight))
        vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0), model_config=None
        )
        config: Any = None
        device = torch.device("cpu")
        self.engine = GlooWeightTransferEngine(config, vllm_config, device, model)
        (port,) = free_ports(1)
        store = open_group_store("127.0.0.1", port, timeout_s)
        init = GlooInitInfo("127.0.0.1", port, 1, 2, BUCKET_BYTES, timeout_s)
        self.threads = ThreadPoolExecutor(1)
        joining = self.threads.submit(Sender, port, 2, timeout_s)
        self.engine.init_transfer_engine(init)
        self.sender = joining.result()
        del store

    def close(self) -> None:
        self.sender.leave()
        self.engine.shutdown()
        self.threads.shutdown()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


@pytest.mark.req("SYNC-03", "SYNC-10")
def test_everything_arrives_as_it_was_sent_and_the_seconds_are_told(ends: Ends) -> None:
    held: Weights = {}

    def keep(name: str, weight: Tensor) -> None:
        held[name] = weight

    ends.look = keep
    sending = ends.threads.submit(ends.sender.send, ends.weights)
    ends.engine.receive_weights(ends.update)
    sending.result()
    assert list(held) == list(ends.weights)
    assert all(torch.equal(held[name], weight) for name, weight in ends.weights.items())
    assert set(ends.engine.progress.seconds) == {"transfer", "load"}


@pytest.mark.req("SYNC-03")
def test_the_next_bucket_is_received_while_one_is_loaded(ends: Ends) -> None:
    """Loading the first waits until the sender is rid of the second."""
    ends.update.parameters = ends.update.parameters[:4]
    sending = ends.threads.submit(ends.sender.send, ends.weights, 2)
    ends.look = lambda name, weight: sending.result(timeout=TIMEOUT_S)
    ends.engine.receive_weights(ends.update)


@pytest.mark.req("SYNC-04")
def test_a_parameter_that_cannot_be_loaded_is_named(ends: Ends) -> None:
    def refuse(name: str, weight: Tensor) -> None:
        if name == "w3":
            raise ValueError("too wide")

    ends.look = refuse
    sending = ends.threads.submit(ends.sender.send, ends.weights, 3)
    with pytest.raises(RuntimeError, match="w3 cannot be loaded: ValueError: too wide"):
        ends.engine.receive_weights(ends.update)
    sending.result()


@pytest.mark.req("SYNC-04")
def test_a_bucket_that_does_not_come_is_named() -> None:
    ends = Ends(timeout_s=0.5)
    ends.threads.submit(ends.sender.send, ends.weights, 1)
    with pytest.raises(RuntimeError, match="the bucket of w2 to w3 did not come"):
        ends.engine.receive_weights(ends.update)
    assert ends.seen == ["w0", "w1"]
    ends.close()


@pytest.mark.req("SYNC-04")
def test_the_time_of_a_transfer_is_one_for_all_its_buckets() -> None:
    """Each bucket comes well within `timeout_s` of the one before."""
    ends = Ends(timeout_s=1.0)
    ends.look = lambda name, weight: time.sleep(0.3)
    ends.threads.submit(ends.sender.send, ends.weights)
    with pytest.raises(RuntimeError, match="not over within 1 s"):
        ends.engine.receive_weights(ends.update)
    ends.close()
