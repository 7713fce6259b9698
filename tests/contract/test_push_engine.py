"""Both ends of a transfer over gloo and ipc on the CPU: the learner's group and `PushEngine`."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learner.rollout.server_process import free_ports
from learner.rollout.sync.group import join_group
from rollout_server.engines.vllm.push_engine import GroupInfo, Manifest, PushEngine, mapped
from rollout_server.weights.pushes import open_tcp_store
from shared_contracts.weights import (
    HOST_MEMORY_NAME,
    HostMemory,
    InitCommunicator,
    SharedMemory,
    Transport,
)
from tests.contract.weight_sender import BUCKET_BYTES, Sender, Weights, manifest, pack, trailer

# Only a test that fails waits so long.
LIMIT_S = 60.0
BOTH = pytest.mark.parametrize("transport", ["gloo", "ipc"])


class Model(nn.Module):
    """Keeps each weight. on_load: called before."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Weights = {}
        self.on_load: Callable[[str], object] = lambda name: None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.on_load(name)
            self.held[name] = weight


def error_of(call: Callable[..., None], *arguments: Any) -> str | None:
    """Return the error of a call as text: one that is kept holds the group open."""
    try:
        call(*arguments)
    except (RuntimeError, ConnectionAbortedError) as error:
        return str(error)
    return None


class Ends:
    """The learner's groups, and the engine of each worker, which has a thread."""

    def __init__(self, transport: Transport = "gloo", workers: int = 1, senders: int = 1) -> None:
        given: dict[str, Any] = {"host": "127.0.0.1", "port": free_ports(1)[0], "senders": senders}
        given |= {"transport": transport, "bucket_bytes": BUCKET_BYTES, "timeout_s": LIMIT_S}
        given |= {"world_size": senders + workers}
        body = InitCommunicator(attempt="a", **given)
        parallel = SimpleNamespace(rank=0)
        config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
        self.models = [Model() for _ in range(workers)]
        self.engines = [PushEngine(config, config, torch.device("cpu"), m) for m in self.models]
        self.threads = ThreadPoolExecutor(body.world_size)
        store = open_tcp_store(body)
        joining = [
            self.threads.submit(engine.init_transfer_engine, GroupInfo(body.model_dump(), i))
            for i, engine in enumerate(self.engines)
        ]
        self.groups = [self.join(body, number) for number in range(senders)]
        for each in joining:
            each.result(LIMIT_S)
        del store

    def join(self, body: InitCommunicator, number: int) -> Any:
        return join_group(body, threading.Event(), number)

    def begin(
        self, listed: Weights, *weights: Iterable[tuple[str, Tensor]]
    ) -> "tuple[list[Future[str | None]], list[Future[str | None]]]":
        """Receive, and send from each sender its own weights; return their errors."""
        parameters = manifest(listed)
        update = Manifest([parameter.model_dump() for parameter in parameters])
        sending = zip(self.groups, weights, strict=False)
        return (
            [self.threads.submit(error_of, e.receive_weights, update) for e in self.engines],
            [self.threads.submit(error_of, g.send, parameters, iter(own)) for g, own in sending],
        )

    def push(self, *weights: Weights) -> None:
        receiving, sending = self.begin(weights[0], *(own.items() for own in weights))
        assert {each.result(LIMIT_S) for each in (*receiving, *sending)} == {None}

    def close(self) -> None:
        for group in self.groups:
            group.abandon()
        for engine in self.engines:
            engine.shutdown()
        self.threads.shutdown()


class PlainEnds(Ends):
    def join(self, body: InitCommunicator, number: int) -> Any:
        return Sender(body.port, body.world_size, body.timeout_s)


def some_weights(start: float = 0.0) -> Weights:
    """A bucket takes two of the first seven; the last is larger than a bucket."""
    count = BUCKET_BYTES // 10
    weights = {f"w{i}": torch.arange(count, dtype=torch.float32) + start + i for i in range(7)}
    large = torch.arange(BUCKET_BYTES, dtype=torch.float64).to(torch.bfloat16) + start
    return weights | {"odd": torch.tensor([start, 1.0, 2.0]), "large": large}


@pytest.mark.req("SYNC-03", "SYNC-06", "ROLL-03")
@BOTH
@pytest.mark.parametrize(("senders", "workers"), [(1, 1), (2, 4)])
def test_every_push_arrives_bit_for_bit(transport: Transport, senders: int, workers: int) -> None:
    """Each sender gives its weights to its own workers. The memory is used again."""
    with closing(Ends(transport, workers, senders)) as ends:
        for start in (0.0, 100.0):
            pushed = [some_weights(start + number) for number in range(senders)]
            ends.push(*pushed)
            for number, model in enumerate(ends.models):
                weights = pushed[number * senders // workers]
                assert list(model.held) == list(weights)
                assert all(torch.equal(model.held[name], weights[name]) for name in weights)


@pytest.mark.req("SYNC-03")
def test_the_next_bucket_is_received_while_one_is_loaded() -> None:
    """The first is loaded when the second was sent: the learner packs the fourth then."""
    weights, sent, in_time = some_weights(), threading.Event(), list[bool]()

    def noting() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            if name == "w6":
                sent.set()
            yield name, weight

    with closing(Ends()) as ends:
        ends.models[0].on_load = lambda name: in_time.append(sent.wait(LIMIT_S))
        (receiving,), _ = ends.begin(weights, noting())
        assert receiving.result(2 * LIMIT_S) is None
    assert all(in_time)


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize("fault", ["a bit", "two words", "two buckets"])
def test_a_bucket_that_is_not_as_it_was_sent_is_named(fault: str) -> None:
    weights = some_weights()
    buckets = [bytearray(bucket) for bucket in pack(weights)]
    digests = trailer(pack(weights))
    if fault == "a bit":
        buckets[1][-1] ^= 0x80
    elif fault == "two words":
        buckets[1][:16] = buckets[1][8:16] + buckets[1][:8]
    else:
        buckets[1], buckets[2] = buckets[2], buckets[1]
    with closing(PlainEnds()) as ends:
        (receiving,), _ = ends.begin(weights)
        for bucket in (*buckets, digests):
            ends.groups[0].broadcast(bytes(bucket))
        many = 2 if fault == "two buckets" else 1
        found = f"{many} of 5 buckets are not as they were sent; the first has w2 to w3"
        assert receiving.result(LIMIT_S) == found


@pytest.mark.req("SYNC-04")
@BOTH
@pytest.mark.parametrize("refused", ["w0", "w3"])
def test_a_worker_that_refuses_a_parameter_ends_all_ranks(
    transport: Transport, refused: str
) -> None:
    def refuse(name: str) -> None:
        if name == refused:
            raise ValueError("too wide")

    weights: Weights = {f"w{i}": torch.full((BUCKET_BYTES // 8,), float(i)) for i in range(12)}
    with closing(Ends(transport, workers=2)) as ends:
        ends.models[0].on_load = refuse
        (first, second), (sending,) = ends.begin(weights, weights.items())
        found = f"{refused} cannot be loaded: ValueError: too wide"
        assert first.result(LIMIT_S / 2) == found
        assert sending.result(LIMIT_S / 2) is not None
        ends.groups[0].abandon()  # as `WeightPusher` does
        assert second.result(LIMIT_S / 2) is not None


@pytest.mark.req("SYNC-04")
@BOTH
@pytest.mark.parametrize("leaves", [True, False])
def test_a_learner_that_leaves_or_is_silent_ends_the_transfer(
    transport: Transport, leaves: bool
) -> None:
    weights, ended = some_weights(), threading.Event()

    def stopping() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            if name == "w4" and leaves:
                ends.groups[0].abandon()
            elif name == "w4":
                ended.wait(LIMIT_S)
            yield name, weight

    with closing(Ends(transport)) as ends:
        group = ends.engines[0]._group
        assert group is not None
        group.timeout_s = LIMIT_S if leaves else 0.5  # a rendezvous takes longer
        (receiving,), (sending,) = ends.begin(weights, stopping())
        assert receiving.result(LIMIT_S / 2) is not None
        ended.set()
        ends.groups[0].abandon()  # as `WeightPusher` does
        assert sending.result(LIMIT_S / 2) is not None
        assert set(ends.models[0].held) <= {"w0", "w1", "w2", "w3"}


@pytest.mark.req("SYNC-04")
def test_after_a_push_over_ipc_no_file_and_no_memory_of_it_is_left() -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with closing(Ends("ipc")) as ends:
        ends.push(some_weights())
        before = files()
        ends.push(some_weights())
        ends.push(some_weights())
        assert files() == before
        assert HOST_MEMORY_NAME not in Path("/proc/self/maps").read_text()


@pytest.mark.req("SRV-06")
def test_only_memory_of_a_learner_is_mapped(tmp_path: Path) -> None:
    """No other file, also one of that name, and none of another size; no file is changed."""

    def map_file(file: int, slot_bytes: int) -> Tensor:
        memory = HostMemory(path=f"/proc/{os.getpid()}/fd/{file}")
        return mapped(SharedMemory(slot_bytes=slot_bytes, memory=memory))

    foreign = tmp_path / HOST_MEMORY_NAME
    foreign.write_bytes(b"mine")
    memory, (reading, writing) = os.memfd_create(HOST_MEMORY_NAME), os.pipe()
    os.truncate(memory, 4096)
    with foreign.open("r+b") as file:
        wrong = [(file.fileno(), 2), (file.fileno(), 4096), (reading, 1)]
        for descriptor, size in (*wrong, (memory, 2047), (memory, 2049), (memory, 2**61)):
            with pytest.raises(RuntimeError, match="not a learner's memory"):
                map_file(descriptor, size)
    with pytest.raises(RuntimeError, match="cannot be opened"):
        map_file(1000000, 1)
    assert (foreign.read_bytes(), os.fstat(memory).st_size) == (b"mine", 4096)
    os.pwrite(memory, b"ab", 0)
    assert map_file(memory, 2048)[:2].tolist() == [97, 98]
    for descriptor in (reading, writing, memory):
        os.close(descriptor)
