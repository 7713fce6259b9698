"""NCCL between threads of this process, over gloo, and CUDA's devices."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partialmethod
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo

from shared_contracts.weights import ready_key

# Only a test that fails waits so long.
NEVER_S = 60.0
ERROR = "NCCL error: unhandled system error"

_thread = threading.local()


@dataclass
class Hanging:
    """A collective that does not end before its group does."""

    gone: threading.Event

    def wait(self, timeout: timedelta) -> None:
        self.gone.wait(timeout.total_seconds())
        raise RuntimeError("NCCL was aborted, or timed out")


class ProcessGroupNCCL:
    """One rank. As in torch, its end aborts what runs.

    made: the ranks, in the order in which they made their groups.
    hangs, dies: (rank, number of its collective, from 0) that does not end as those after it, or
        fails.
    on_hang: called when a collective hangs. over: the test has no more use for it.
    """

    made: ClassVar[list[int]]
    hangs = dies = (-1, -1)
    on_hang = staticmethod(lambda: None)
    over: ClassVar[threading.Event]
    all_in: ClassVar[threading.Barrier]

    class Options:
        _timeout = timedelta(minutes=10)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.made.append(rank)
        assert store.check([ready_key(other) for other in range(size)]), "all ranks have met"
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1", "torch starts no watchdog"
        assert getattr(_thread, "gpu", None) == 0, "the device of this thread is set"
        self._parts = store, rank, size
        self._gloo: Any = None
        self._next = 0
        self._gone = threading.Event()

    def __del__(self) -> None:
        self._gone.set()

    def __getattr__(self, name: str) -> Any:  # set_timeout
        return getattr(self._gloo, name)

    def _begin(self, name: str, *arguments: Any) -> Any:
        (store, rank, size), place = self._parts, (self._parts[1], self._next)
        self._next += 1
        if place == self.dies:
            self._gloo = None  # closes the connections
            raise RuntimeError(ERROR)
        if place == self.hangs:
            self.on_hang()
        hangs = place[0] == self.hangs[0] and place[1] >= self.hangs[1]
        if place[1] == 0:  # `ncclCommInitRank` waits for all ranks, without a deadline
            (self.over if hangs else self.all_in).wait(NEVER_S)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
        return Hanging(self._gone) if hangs else getattr(self._gloo, name)(*arguments)

    allreduce = partialmethod(_begin, "allreduce")
    broadcast = partialmethod(_begin, "broadcast")


@contextmanager
def install(patch: pytest.MonkeyPatch) -> Iterator[type[ProcessGroupNCCL]]:
    """Put NCCL and CUDA into both programs; this thread has a current GPU, a new one has none.

    At the end, what waits in NCCL fails.
    """
    import learner.rollout.parallel_calls as threads
    import learner.rollout.sync.group as sender
    import rollout_server.engines.vllm.push_engine as receiver

    class Nccl(ProcessGroupNCCL):
        made, all_in, over = [], threading.Barrier(3), threading.Event()

    def set_device(_: object) -> None:
        _thread.gpu = 0

    set_device(0)
    cuda = {"is_initialized": lambda: True, "current_device": lambda: 0, "set_device": set_device}
    faked = {"device": lambda *_: torch.zeros(0).device, "cuda": SimpleNamespace(**cuda)}
    faked["accelerator"] = SimpleNamespace(set_device_index=set_device)
    patch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl)
    for module in (threads, sender, receiver):
        patch.setattr(module, "torch", SimpleNamespace(**vars(torch) | faked))
    yield Nccl
    Nccl.over.set()
    Nccl.all_in.abort()
