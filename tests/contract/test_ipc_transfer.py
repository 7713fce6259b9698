"""Both ends of the `ipc` transport on the CPU: buckets in memory that the two of them map."""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from learner.rollout.server_process import free_ports
from learner.rollout.sync.transports import join_group
from rollout_server.engines.vllm.weight_engines import (
    GlooInitInfo,
    GlooUpdateInfo,
    IpcWeightTransferEngine,
    mapped,
)
from rollout_server.weights.weight_group import open_group_store
from shared_contracts.weights import (
    HOST_MEMORY_NAME,
    HostMemory,
    InitCommunicator,
    SharedBuffer,
)
from tests.contract.weight_sender import BUCKET_BYTES, Weights, manifest

TIMEOUT_S = 20.0


class Model(nn.Module):
    """Keeps what it is given, as vLLM's reload does until a layer is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Weights = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.held |= dict(weights)


class Ends:
    """The learner's group and a worker's engine."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.model = Model()
        vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0), model_config=None
        )
        config: Any = None
        self.engine = IpcWeightTransferEngine(config, vllm_config, torch.device("cpu"), self.model)
        (port,) = free_ports(1)
        body = InitCommunicator(
            host="127.0.0.1",
            port=port,
            world_size=2,
            attempt="",
            transport="ipc",
            bucket_bytes=BUCKET_BYTES,
            timeout_s=timeout_s,
        )
        store = open_group_store("127.0.0.1", port, timeout_s)
        self.threads = ThreadPoolExecutor(1)
        joining = self.threads.submit(join_group, body, threading.Event())
        self.engine.init_transfer_engine(
            GlooInitInfo("127.0.0.1", port, 1, 2, BUCKET_BYTES, timeout_s)
        )
        self.group = joining.result()
        del store

    def send(self, weights: Weights) -> None:
        parameters = manifest(weights)
        sending = self.threads.submit(self.group.send, parameters, iter(weights.items()))
        self.engine.receive_weights(GlooUpdateInfo([p.model_dump() for p in parameters]))
        sending.result()

    def close(self) -> None:
        self.group.close()
        self.engine.shutdown()
        self.threads.shutdown()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def some_weights(start: float) -> Weights:
    """A bucket takes two of the first seven; the last is larger than a bucket."""
    count = BUCKET_BYTES // 10
    weights = {f"w{i}": torch.arange(count, dtype=torch.float32) + start + i for i in range(7)}
    large = torch.arange(BUCKET_BYTES, dtype=torch.float64).to(torch.bfloat16) + start
    return weights | {"odd": torch.tensor([start, 1.0, 2.0]), "large": large}


@pytest.mark.req("SYNC-03", "ROLL-03")
def test_every_push_arrives_as_it_was_sent_though_one_buffer_carries_it_all(ends: Ends) -> None:
    for start in (0.0, 100.0):
        weights = some_weights(start)
        ends.send(weights)
        assert list(ends.model.held) == list(weights)
        for name, weight in weights.items():
            assert torch.equal(ends.model.held[name], weight), name


@pytest.mark.req("SYNC-04")
def test_after_a_push_the_learner_holds_no_file_of_it_open(ends: Ends) -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    ends.send(some_weights(0.0))
    before = files()
    for _ in range(3):
        ends.send(some_weights(1.0))
    assert files() == before


@pytest.mark.req("SYNC-04")
def test_after_a_push_the_buffer_is_mapped_nowhere(ends: Ends) -> None:
    ends.send(some_weights(0.0))
    assert HOST_MEMORY_NAME not in Path("/proc/self/maps").read_text()


@pytest.mark.req("SYNC-04")
def test_a_worker_that_does_not_come_ends_the_transfer_with_an_error() -> None:
    ends = Ends(timeout_s=0.5)
    weights = some_weights(0.0)
    with pytest.raises(RuntimeError):
        ends.group.send(manifest(weights), iter(weights.items()))
    ends.close()


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/fd/3", "/proc/1/fd/../mem", ""])
def test_only_open_files_of_a_process_are_mapped(path: str) -> None:
    with pytest.raises(ValidationError):
        HostMemory(path=path)


def opened(file: int, size: int) -> SharedBuffer:
    return SharedBuffer(bytes=size, memory=HostMemory(path=f"/proc/{os.getpid()}/fd/{file}"))


@pytest.mark.req("SRV-06")
def test_no_other_file_is_mapped_and_none_is_changed(tmp_path: Path) -> None:
    foreign = tmp_path / HOST_MEMORY_NAME
    foreign.write_bytes(b"mine")
    with foreign.open("r+b") as file:
        for size in (4, 8192):
            with pytest.raises(RuntimeError, match="not a buffer"):
                mapped(opened(file.fileno(), size))
    assert foreign.read_bytes() == b"mine"
    reading, writing = os.pipe()
    with pytest.raises(RuntimeError, match="not a buffer"):
        mapped(opened(reading, 1))
    with pytest.raises(RuntimeError, match="cannot be opened"):
        mapped(SharedBuffer(bytes=1, memory=HostMemory(path=f"/proc/{os.getpid()}/fd/1000000")))
    os.close(reading)
    os.close(writing)


@pytest.mark.req("SRV-06")
def test_a_buffer_of_another_size_is_refused_and_does_not_grow() -> None:
    file = os.memfd_create(HOST_MEMORY_NAME)
    os.truncate(file, 4096)
    for size in (4095, 4097, 2**62):
        with pytest.raises(RuntimeError, match="4096 bytes, not a buffer"):
            mapped(opened(file, size))
    assert os.fstat(file).st_size == 4096
    os.pwrite(file, b"ab", 0)
    assert mapped(opened(file, 4096))[:2].tolist() == [97, 98]
    os.close(file)
