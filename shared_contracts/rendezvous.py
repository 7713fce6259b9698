"""Rendezvous of the ranks of a weight group, in both programs (FULL-07).

`ncclCommInitRank` cannot be interrupted. So a rank enters it only after all ranks have imported
their libraries, chosen their devices, and set their ready keys in the server's store.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from shared_contracts.machine import address_towards
from shared_contracts.weights import InitCommunicator, group_prefix

_POLL_S = 0.01
# Torch reads this when it creates an NCCL group.
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_creation_lock = threading.Lock()


class Store(Protocol):
    """The used part of torch's `TCPStore`. A closed store raises RuntimeError."""

    def set(self, key: str, value: str, /) -> object: ...

    def check(self, keys: list[str], /) -> bool: ...


def join_ranks(
    torch: Any,
    store: Store,
    init: InitCommunicator,
    rank: int,
    number: int,
    device: Any,
    given_up: Callable[[], bool] = lambda: False,
) -> Any:
    """Join a process group of torch; return it after all ranks have joined.

    torch: the module, which this package does not import. store: `TCPStore` of the rendezvous.
    number: of the group, which has one sender. device: of its buckets; NCCL: the current device.
    Raises as `meet`.
    """
    distributed, ranks = torch.distributed, init.world_size // init.senders
    timeout = timedelta(seconds=init.timeout_s)
    prefixed = distributed.PrefixStore(group_prefix(number), store)
    meet(prefixed, rank, ranks, init.timeout_s, given_up)
    if init.transport == "nccl":
        nccl = distributed.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        with _without_watchdog():
            group = distributed.ProcessGroupNCCL(prefixed, rank, ranks, nccl)
    else:
        gloo = distributed.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        host = address_towards(init.host)
        gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        group = distributed.ProcessGroupGloo(prefixed, rank, ranks, gloo)
    group.allreduce(torch.zeros(1, device=device)).wait(timeout)
    return group


def meet(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until every rank is ready.

    Raises TimeoutError with the missing ranks after `timeout_s` seconds, and
    ConnectionAbortedError if `given_up` returns true.
    """
    store.set(ready_key(rank), "")
    keys = [ready_key(other) for other in range(world_size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if given_up():
            raise ConnectionAbortedError("the group was given up")
        if time.monotonic() > deadline:
            missing = [other for other in range(world_size) if not store.check([ready_key(other)])]
            raise TimeoutError(f"{', '.join(map(rank_name, missing))}: missing for {timeout_s:g} s")
        time.sleep(_POLL_S)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make NCCL groups that are created inside raise errors from `wait`.

    Otherwise torch's watchdog thread ends the process if another rank is lost.
    """
    with _creation_lock:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            os.environ.pop(_BLOCKING_WAIT)
            if before is not None:
                os.environ[_BLOCKING_WAIT] = before


def ready_key(rank: int) -> str:
    """Return the key that a rank sets when it is ready."""
    return f"ready/{rank}"


def rank_name(rank: int) -> str:
    """Return the name of a rank in errors."""
    return "learner (rank 0)" if rank == 0 else f"engine worker (rank {rank})"
