"""NCCL between the threads of this process: what lies below vLLM's communicator; CUDA's devices.

Everything above is real: our sender and rendezvous, vLLM's receiver, torch's store.
"""

import contextlib
import threading
from dataclasses import dataclass, field
from functools import partial
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from shared_contracts.rendezvous import name_of

# Only a test that fails waits so long.
NEVER_S = 60.0
# A thread's current device before it is set.
OF_A_NEW_THREAD = "that of a new thread"


_of_thread = threading.local()


def current_device() -> str:
    """Of this thread."""
    device: str = getattr(_of_thread, "device", OF_A_NEW_THREAD)
    return device


def use_device(device: object) -> None:
    """In this thread."""
    _of_thread.device = str(device)


@dataclass
class Nccl:
    """State that the ranks of groups share.

    entered: ranks that have called NCCL's rendezvous, and their devices. hangs: the rendezvous
    does not end before `release`. dies: this rank fails in it once all are there, and the others
    wait. broken_at: the broadcast, counted from 1, that fails for its receivers. stuck: no
    broadcast of rank 0 ends before it is aborted. sending: one of them has begun. over: the test
    has ended.
    """

    world_size: int = 2
    entered: list[tuple[int, Any]] = field(default_factory=list)
    hangs: bool = False
    dies: int | None = None
    broken_at: int | None = None
    stuck: bool = False
    sending: threading.Event = field(default_factory=threading.Event)
    buckets: int = 0
    over: bool = False
    released: threading.Event = field(default_factory=threading.Event)
    made: list["Communicator"] = field(default_factory=list)
    _groups: dict[bytes, list[Queue[Tensor] | None]] = field(default_factory=dict)
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def join(self, unique_id: bytes, rank: int, world_size: int, device: Any) -> "Communicator":
        """As `uid_init_process_group`: waits for all ranks, without a deadline."""
        assert world_size == self.world_size
        assert str(device) == current_device(), "as vLLM's own streams are made there"
        with self._arrived:
            self.entered.append((rank, device))
            self._arrived.notify_all()
            if self.dies == rank:
                others = lambda: len(self.entered) >= world_size  # noqa: E731
                assert self._arrived.wait_for(others, NEVER_S)
                raise RuntimeError("NCCL error: unhandled system error")
            group = self._groups.setdefault(unique_id, [None] * world_size)
            assert group[rank] is None, f"{name_of(rank)} is there twice"
            own: Queue[Tensor] = Queue()
            group[rank] = own
            communicator = Communicator(self, rank, own, group)
            self.made.append(communicator)
            self._arrived.notify_all()
            if self.hangs or self.dies is not None:
                free = self.released.is_set
            else:
                free = partial(all, group)
            assert self._arrived.wait_for(lambda: free() or self.over, NEVER_S)
        return communicator

    def release(self, over: bool = False) -> None:
        """Let the calls that hang come to an end. over: all others, too."""
        with self._arrived:
            self.over = over
            self.released.set()
            self._arrived.notify_all()


class Communicator:
    """One rank, as vLLM's `PyNcclCommunicator` is used. `destroy` aborts what runs."""

    def __init__(
        self, nccl: Nccl, rank: int, own: Queue[Tensor], group: list[Queue[Tensor] | None]
    ) -> None:
        self._nccl = nccl
        self._rank = rank
        self._group = group
        self._own = own
        self._received = 0
        self.destroyed = threading.Event()

    def broadcast(self, tensor: Tensor, src: int) -> None:
        if self._rank != src:
            self._received += 1
            if self._nccl.broken_at == self._received:
                raise RuntimeError("NCCL error: remote process exited or there was a network error")
            tensor.copy_(self._own.get(timeout=NEVER_S))
            return
        if self._nccl.stuck:
            self._nccl.sending.set()
            assert self.destroyed.wait(NEVER_S)
            raise RuntimeError("NCCL error: remote process exited or there was a network error")
        assert current_device() == "cpu"
        self._nccl.buckets += 1
        for rank, queue in enumerate(self._group):
            if rank != src:
                assert queue is not None
                queue.put(tensor.clone())

    def destroy(self) -> None:
        self.destroyed.set()


def install(monkeypatch: pytest.MonkeyPatch, nccl: Nccl) -> None:
    """CUDA's streams, the current device of each thread and the communicator are faked."""
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    import learner.rollout.sync.nccl
    import rollout_server.engines.vllm.nccl_engine as worker

    class Stream:
        def synchronize(self) -> None:
            """A copy on the CPU is over when it returns."""

    use_device("cpu")  # in the thread of the test
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, n: [Stream()] * n)
    monkeypatch.setattr(nccl_common, "uid_init_process_group", nccl.join)
    monkeypatch.setattr(learner.rollout.sync.nccl, "uid_init_process_group", nccl.join)
    monkeypatch.setattr(worker, "NCCLLibrary", object)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    monkeypatch.setattr(torch.cuda, "set_device", use_device)
    monkeypatch.setattr(torch.accelerator, "current_device_index", current_device)
    monkeypatch.setattr(torch.accelerator, "set_device_index", use_device)
