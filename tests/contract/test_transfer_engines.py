"""Both ends of the transports gloo and ipc on the CPU, with a small model in the worker's seat."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from learner.rollout.server_process import free_ports
from learner.rollout.sync.transports import WeightGroup, join_group
from rollout_server.engines.vllm.weight_engines import (
    GlooInitInfo,
    GlooUpdateInfo,
    GlooWeightTransferEngine,
    IpcWeightTransferEngine,
    mapped,
)
from rollout_server.weights.weight_group import open_group_store
from shared_contracts.weights import (
    HOST_MEMORY_NAME,
    HostMemory,
    InitCommunicator,
    SharedBuffer,
    Transport,
)
from tests.contract.weight_sender import BUCKET_BYTES, Weights, manifest

# Only a test that fails waits so long.
LIMIT_S = 60.0
ENGINES: dict[Transport, type[GlooWeightTransferEngine]] = {
    "gloo": GlooWeightTransferEngine,
    "ipc": IpcWeightTransferEngine,
}
BOTH = pytest.mark.parametrize("transport", ["gloo", "ipc"])


class Model(nn.Module):
    """Keeps each weight. on_load: called before."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Weights = {}
        self.on_load: Callable[[str], None] = lambda name: None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.on_load(name)
            self.held[name] = weight


class Ends:
    """The learner's group and the engines of its workers, of which each has a thread."""

    def __init__(self, transport: Transport, workers: int = 1, timeout_s: float = LIMIT_S) -> None:
        self.models = [Model() for _ in range(workers)]
        self.threads = ThreadPoolExecutor(1 + workers)
        (port,) = free_ports(1)
        body = InitCommunicator(
            host="127.0.0.1",
            port=port,
            world_size=1 + workers,
            attempt="",
            transport=transport,
            bucket_bytes=BUCKET_BYTES,
            timeout_s=timeout_s,
        )
        config: Any = None
        vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0), model_config=None
        )
        self.engines = [
            ENGINES[transport](config, vllm_config, torch.device("cpu"), model)
            for model in self.models
        ]
        store = open_group_store("127.0.0.1", port, timeout_s)
        joining = [
            self.threads.submit(
                engine.init_transfer_engine,
                GlooInitInfo("127.0.0.1", port, rank, 1 + workers, BUCKET_BYTES, timeout_s),
            )
            for rank, engine in enumerate(self.engines, start=1)
        ]
        self.group: WeightGroup = join_group(body, threading.Event())
        for each in joining:
            each.result(LIMIT_S)
        del store

    def send(self, weights: Iterable[tuple[str, Tensor]], listed: Weights) -> "Future[None]":
        return self.threads.submit(self.group.send, manifest(listed), iter(weights))

    def receive(self, listed: Weights) -> "list[Future[str | None]]":
        """The error of each worker, as text: an error that is kept holds the group open."""
        update = GlooUpdateInfo([p.model_dump() for p in manifest(listed)])

        def error_of(engine: GlooWeightTransferEngine) -> str | None:
            try:
                engine.receive_weights(update)
            except RuntimeError as error:
                return str(error)
            return None

        return [self.threads.submit(error_of, engine) for engine in self.engines]

    def push(self, weights: Weights) -> None:
        sending = self.send(weights.items(), weights)
        assert [each.result(LIMIT_S) for each in self.receive(weights)] == [None] * len(self.models)
        sending.result(LIMIT_S)

    def close(self) -> None:
        self.group.close()
        for engine in self.engines:
            engine.shutdown()
        self.threads.shutdown()


@pytest.fixture
def made() -> Iterator[Callable[..., Ends]]:
    """Make `Ends`, which are closed after the test."""
    everything: list[Ends] = []

    def make(*arguments: Any, **options: Any) -> Ends:
        everything.append(Ends(*arguments, **options))
        return everything[-1]

    yield make
    for ends in everything:
        ends.close()


def some_weights(start: float = 0.0) -> Weights:
    """A bucket takes two of the first seven; the last is larger than a bucket."""
    count = BUCKET_BYTES // 10
    weights = {f"w{i}": torch.arange(count, dtype=torch.float32) + start + i for i in range(7)}
    large = torch.arange(BUCKET_BYTES, dtype=torch.float64).to(torch.bfloat16) + start
    return weights | {"odd": torch.tensor([start, 1.0, 2.0]), "large": large}


@pytest.mark.req("SYNC-03", "SYNC-10", "ROLL-03")
@BOTH
def test_every_push_arrives_bit_for_bit(made: Callable[..., Ends], transport: Transport) -> None:
    """The second push uses the memory of the first again."""
    ends = made(transport)
    for start in (0.0, 100.0):
        weights = some_weights(start)
        ends.push(weights)
        (model,) = ends.models
        assert list(model.held) == list(weights)
        assert all(torch.equal(model.held[name], weight) for name, weight in weights.items())
    assert set(ends.engines[0].progress.seconds) == {"transfer", "load"}


@pytest.mark.req("SYNC-03")
def test_the_next_bucket_is_received_while_one_is_loaded(made: Callable[..., Ends]) -> None:
    """The load of the first waits until the second was sent."""
    ends = made("gloo")
    weights = dict(list(some_weights().items())[:4])
    sending = ends.send(weights.items(), weights)
    ends.models[0].on_load = lambda name: sending.result(LIMIT_S)
    assert [each.result(LIMIT_S) for each in ends.receive(weights)] == [None]


@pytest.mark.req("SYNC-04")
@BOTH
@pytest.mark.parametrize("refused", ["w0", "w3"])
def test_a_worker_that_refuses_a_parameter_ends_all_ranks(
    made: Callable[..., Ends], transport: Transport, refused: str
) -> None:
    ends = made(transport, workers=2)

    def refuse(name: str) -> None:
        if name == refused:
            raise ValueError("too wide")

    ends.models[0].on_load = refuse
    weights: Weights = {f"w{i}": torch.full((BUCKET_BYTES // 8,), float(i)) for i in range(12)}
    sending = ends.send(weights.items(), weights)
    first, second = (each.result(LIMIT_S / 2) for each in ends.receive(weights))
    assert first == f"{refused} cannot be loaded: ValueError: too wide"
    assert second is not None
    assert isinstance(sending.exception(LIMIT_S / 2), RuntimeError)


@pytest.mark.req("SYNC-04")
def test_a_bucket_that_does_not_come_ends_the_transfer(made: Callable[..., Ends]) -> None:
    """The deadline is one for all buckets: here each would have time of its own."""
    ends = made("gloo", timeout_s=1.0)
    weights, stop = some_weights(), threading.Event()

    def stopping() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            if name == "w2":
                stop.wait(LIMIT_S)
            yield name, weight

    ends.send(stopping(), weights)
    (receiving,) = ends.receive(weights)
    assert "the bucket of w2 to w3 did not come" in str(receiving.result(LIMIT_S))
    stop.set()
    assert list(ends.models[0].held) == ["w0", "w1"]


@pytest.mark.req("SYNC-04")
def test_after_a_push_over_ipc_no_file_and_no_memory_of_it_is_left(
    made: Callable[..., Ends],
) -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    ends = made("ipc")
    ends.push(some_weights())
    before = files()
    for _ in range(3):
        ends.push(some_weights())
    assert files() == before
    assert HOST_MEMORY_NAME not in Path("/proc/self/maps").read_text()


# --- what a worker maps


def opened(file: int, size: int) -> SharedBuffer:
    return SharedBuffer(bytes=size, memory=HostMemory(path=f"/proc/{os.getpid()}/fd/{file}"))


@pytest.mark.req("SRV-06")
def test_only_a_buffer_of_a_process_is_mapped(tmp_path: Path) -> None:
    """No other file, also one of that name; and no such file is changed."""
    for path in ("/etc/passwd", "/proc/self/fd/3", "/proc/1/fd/../mem", ""):
        with pytest.raises(ValidationError):
            HostMemory(path=path)
    foreign = tmp_path / HOST_MEMORY_NAME
    foreign.write_bytes(b"mine")
    reading, writing = os.pipe()
    with foreign.open("r+b") as file:
        for descriptor, size in ((file.fileno(), 4), (file.fileno(), 8192), (reading, 1)):
            with pytest.raises(RuntimeError, match="not a buffer"):
                mapped(opened(descriptor, size))
    assert foreign.read_bytes() == b"mine"
    with pytest.raises(RuntimeError, match="cannot be opened"):
        mapped(opened(1000000, 1))
    os.close(reading)
    os.close(writing)


@pytest.mark.req("SRV-06")
def test_a_buffer_of_another_size_is_not_mapped_and_does_not_grow() -> None:
    file = os.memfd_create(HOST_MEMORY_NAME)
    os.truncate(file, 4096)
    for size in (4095, 4097, 2**62):
        with pytest.raises(RuntimeError, match="4096 bytes, not a buffer"):
            mapped(opened(file, size))
    assert os.fstat(file).st_size == 4096
    os.pwrite(file, b"ab", 0)
    assert mapped(opened(file, 4096))[:2].tolist() == [97, 98]
    os.close(file)
