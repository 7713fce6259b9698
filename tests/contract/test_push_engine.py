"""Both ends of a transfer over gloo and ipc on the CPU: the learner's group and `PushEngine`."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError
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
        self.on_load: Callable[[str], None] = lambda name: None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.on_load(name)
            self.held[name] = weight


class Ends:
    """What joins for each sender in `groups`; and the engine of each worker, which has a thread."""

    def __init__(self, transport: Transport = "gloo", workers: int = 1, **options: Any) -> None:
        (port,) = free_ports(1)
        given = {"host": "127.0.0.1", "port": port, "transport": transport, "attempt": "a"}
        given |= {"senders": 1, "bucket_bytes": BUCKET_BYTES, "timeout_s": LIMIT_S} | options
        given["world_size"] = given["senders"] + workers
        body = InitCommunicator.model_validate(given)
        del given["attempt"]
        self.models = [Model() for _ in range(workers)]
        self.threads = ThreadPoolExecutor(body.world_size)
        vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0), model_config=None
        )
        device, unused = torch.device("cpu"), cast(Any, None)
        self.engines = [PushEngine(unused, vllm_config, device, model) for model in self.models]
        store = open_tcp_store(body)
        joining = [
            self.threads.submit(engine.init_transfer_engine, GroupInfo(**given, first_worker=i))
            for i, engine in enumerate(self.engines)
        ]
        self.groups = [self.join(body, number) for number in range(body.senders)]
        for each in joining:
            each.result(LIMIT_S)
        del store

    def join(self, body: InitCommunicator, number: int) -> Any:
        return join_group(body, threading.Event(), number)

    def begin(
        self, listed: Weights, *weights: Iterable[tuple[str, Tensor]]
    ) -> "tuple[list[Future[str | None]], list[Future[None]]]":
        """Receive, and send from each sender its own weights.

        Returns the error of each worker as text (one that is kept holds the group open), and what
        comes of each sender.
        """
        parameters = manifest(listed)
        update = Manifest([parameter.model_dump() for parameter in parameters])

        def error_of(engine: PushEngine) -> str | None:
            try:
                engine.receive_weights(update)
            except RuntimeError as error:
                return str(error)
            return None

        return (
            [self.threads.submit(error_of, engine) for engine in self.engines],
            [
                self.threads.submit(group.send, parameters, iter(own))
                for group, own in zip(self.groups, weights, strict=False)
            ],
        )

    def push(self, *weights: Weights) -> None:
        receiving, sending = self.begin(weights[0], *(own.items() for own in weights))
        assert {each.result(LIMIT_S) for each in receiving} == {None}
        for each in sending:
            each.result(LIMIT_S)

    def close(self) -> None:
        for group in self.groups:
            group.close()
        for engine in self.engines:
            engine.shutdown()
        self.threads.shutdown()


class PlainEnds(Ends):
    """The sender is in plain torch."""

    def join(self, body: InitCommunicator, number: int) -> Any:
        return Sender(body.port, body.world_size, body.timeout_s)


@pytest.fixture
def made() -> Iterator[Callable[..., Ends]]:
    """Make `Ends`, which are closed after the test."""
    with ExitStack() as stack:

        def make(*arguments: Any, **options: Any) -> Ends:
            return stack.enter_context(closing(Ends(*arguments, **options)))

        yield make


def some_weights(start: float = 0.0) -> Weights:
    """A bucket takes two of the first seven; the last is larger than a bucket."""
    count = BUCKET_BYTES // 10
    weights = {f"w{i}": torch.arange(count, dtype=torch.float32) + start + i for i in range(7)}
    large = torch.arange(BUCKET_BYTES, dtype=torch.float64).to(torch.bfloat16) + start
    return weights | {"odd": torch.tensor([start, 1.0, 2.0]), "large": large}


def stop_unless(holds: bool) -> None:
    assert holds


def assert_held(model: Model, weights: Weights) -> None:
    assert list(model.held) == list(weights)
    assert all(torch.equal(model.held[name], weight) for name, weight in weights.items())


@pytest.mark.req("SYNC-03", "SYNC-06", "ROLL-03")
@BOTH
def test_every_push_arrives_bit_for_bit(made: Callable[..., Ends], transport: Transport) -> None:
    """The second push uses the memory of the first again."""
    ends = made(transport)
    for start in (0.0, 100.0):
        weights = some_weights(start)
        ends.push(weights)
        assert_held(ends.models[0], weights)


@pytest.mark.req("SYNC-03", "ROLL-03")
@BOTH
def test_each_sender_gives_its_weights_to_its_own_workers(
    made: Callable[..., Ends], transport: Transport
) -> None:
    ends = made(transport, workers=4, senders=2)
    first, second = some_weights(0.0), some_weights(100.0)
    ends.push(first, second)
    for model, weights in zip(ends.models, (first, first, second, second), strict=True):
        assert_held(model, weights)


@pytest.mark.req("SYNC-03")
def test_the_next_bucket_is_received_while_one_is_loaded(made: Callable[..., Ends]) -> None:
    """The first is loaded when the second was sent: the learner packs the fourth then."""
    ends, weights, sent = made(), some_weights(), threading.Event()
    ends.models[0].on_load = lambda name: stop_unless(sent.wait(LIMIT_S))

    def noting() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            if name == "w6":
                sent.set()
            yield name, weight

    (receiving,), _ = ends.begin(weights, noting())
    assert receiving.result(LIMIT_S) is None


# --- transfers that break


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize("fault", ["a bit", "two words", "two buckets"])
def test_a_bucket_that_is_not_as_it_was_sent_is_named(fault: str) -> None:
    weights = some_weights()
    buckets = [bytearray(bucket) for bucket in pack(weights)]
    last = trailer(pack(weights))
    if fault == "a bit":
        buckets[1][-1] ^= 0x80
    elif fault == "two words":
        buckets[1][:16] = buckets[1][8:16] + buckets[1][:8]
    else:
        buckets[1], buckets[2] = buckets[2], buckets[1]
    many = 2 if fault == "two buckets" else 1
    with closing(PlainEnds()) as ends:
        (receiving,), _ = ends.begin(weights)
        for bucket in (*buckets, last):
            ends.groups[0].broadcast(bytes(bucket))
        found = f"{many} of 5 buckets are not as they were sent; the first has w2 to w3"
        assert receiving.result(LIMIT_S) == found


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
    receiving, (sending,) = ends.begin(weights, weights.items())
    first, second = (each.result(LIMIT_S / 2) for each in receiving)
    assert first == f"{refused} cannot be loaded: ValueError: too wide"
    assert second is not None
    assert isinstance(sending.exception(LIMIT_S / 2), RuntimeError)


@pytest.mark.req("SYNC-04")
@BOTH
@pytest.mark.parametrize("timeout_s", [1.0, LIMIT_S], ids=["is silent", "leaves"])
def test_a_learner_that_is_silent_or_leaves_ends_the_transfer(
    made: Callable[..., Ends], transport: Transport, timeout_s: float
) -> None:
    ends, weights, ended = made(transport, timeout_s=timeout_s), some_weights(), threading.Event()

    def stopping() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            if name == "w4" and timeout_s == LIMIT_S:
                ends.groups[0].abandon()
            elif name == "w4":
                ended.wait(LIMIT_S)
            yield name, weight

    (receiving,), (sending,) = ends.begin(weights, stopping())
    assert receiving.result(LIMIT_S / 2) is not None
    ended.set()
    assert sending.exception(LIMIT_S / 2) is not None
    assert set(ends.models[0].held) <= {"w0", "w1", "w2", "w3"}


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


def of_file(file: int, slot_bytes: int) -> SharedMemory:
    path = f"/proc/{os.getpid()}/fd/{file}"
    return SharedMemory(slot_bytes=slot_bytes, memory=HostMemory(path=path))


@pytest.mark.req("SRV-06")
def test_only_memory_of_a_learner_is_mapped(tmp_path: Path) -> None:
    """No other file, also one of that name, and none of another size; no file is changed."""
    for path in ("/etc/passwd", "/proc/self/fd/3", "/proc/1/fd/../mem", ""):
        with pytest.raises(ValidationError):
            HostMemory(path=path)
    foreign = tmp_path / HOST_MEMORY_NAME
    foreign.write_bytes(b"mine")
    reading, writing = os.pipe()
    memory = os.memfd_create(HOST_MEMORY_NAME)
    os.truncate(memory, 4096)
    with foreign.open("r+b") as file:
        wrong = [(file.fileno(), 2), (file.fileno(), 4096), (reading, 1)]
        for descriptor, size in (*wrong, (memory, 2047), (memory, 2049), (memory, 2**61)):
            with pytest.raises(RuntimeError, match="not a learner's memory"):
                mapped(of_file(descriptor, size))
    with pytest.raises(RuntimeError, match="cannot be opened"):
        mapped(of_file(1000000, 1))
    assert (foreign.read_bytes(), os.fstat(memory).st_size) == (b"mine", 4096)
    os.pwrite(memory, b"ab", 0)
    assert mapped(of_file(memory, 2048))[:2].tolist() == [97, 98]
    for descriptor in (reading, writing, memory):
        os.close(descriptor)
