"""Several blocking calls at once, in threads that never keep a process from ending."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Queue
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Calls(Generic[K, T]):
    """Calls that run at the same time; they are taken in the order in which they end.

    The threads are daemons: calls that still wait for their servers can be left behind.
    """

    def __init__(self) -> None:
        self._ended: Queue[tuple[K, Future[T]]] = Queue()

    def start(self, key: K, call: Callable[[], T]) -> None:
        """key: comes back with the outcome."""
        threading.Thread(target=self._run, args=(key, call), daemon=True).start()

    def take(self, timeout_s: float | None = None) -> tuple[K, Future[T]]:
        """The next call that has ended; its future holds what it returned or raised.

        Raises `queue.Empty` when none ends within `timeout_s`.
        """
        return self._ended.get(timeout=timeout_s)

    def _run(self, key: K, call: Callable[[], T]) -> None:
        outcome: Future[T] = Future()
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            outcome.set_exception(error)
        self._ended.put((key, outcome))


def in_parallel(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Results of the calls, in their order; raises the first error as soon as it happens.

    After an error or an interrupt, calls that still run are left behind.
    """
    running: Calls[int, T] = Calls()
    for index, call in enumerate(calls):
        running.start(index, call)
    results: dict[int, T] = {}
    for _ in calls:
        index, outcome = running.take()
        results[index] = outcome.result()
    return [results[index] for index in range(len(calls))]
