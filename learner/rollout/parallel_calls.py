"""Blocking calls in daemon threads, which can be left behind.

The process can end while they run, which it cannot with the threads of a `ThreadPoolExecutor`.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from typing import TypeVar

import torch

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str | None = None) -> Future[T]:
    """Begin a call. The thread uses the GPU of this one: CUDA starts it at GPU 0 (FULL-07)."""
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def in_parallel(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of the calls, in order; raise the first error as soon as it happens.

    After an error or an interrupt, calls that still run are left behind.
    """
    outcomes = [in_thread(call) for call in calls]
    for outcome in as_completed(outcomes):
        outcome.result()
    return [outcome.result() for outcome in outcomes]
