"""The handshake before a weight group forms, which both programs run (FULL-07).

Nothing can interrupt a rank inside `ncclCommInitRank`. So no rank enters it before every rank has
imported what it needs, has chosen its device and has said so at the store of the server.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

_POLL_S = 0.01
# Torch reads this when it makes an NCCL group.
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_making = threading.Lock()


class Store(Protocol):
    """Torch's `TCPStore`, as it is used here. A closed one raises RuntimeError."""

    def set(self, key: str, value: str, /) -> object: ...

    def check(self, keys: list[str], /) -> bool: ...


def meet(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Return once every rank is ready.

    Raises TimeoutError with the ranks that are missing after `timeout_s`, and
    ConnectionAbortedError once `given_up` returns true.
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
def without_watchdog() -> Iterator[None]:
    """Have an NCCL group that is made inside raise its errors where its work is waited for.

    Otherwise a thread of torch ends the process: of a learner when its server is lost, and of an
    engine when its learner is.
    """
    with _making:
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
