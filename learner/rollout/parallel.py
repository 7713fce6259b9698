"""Several blocking calls at once, in threads that never keep a process from ending."""

import threading
from collections.abc import Callable, Sequence
from queue import Queue
from typing import TypeVar

T = TypeVar("T")


def in_parallel(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Results of the calls, in their order; raises the first error as soon as it happens.

    The threads are daemons: after an error or an interrupt, calls that still wait for
    their servers are left behind.
    """
    outcomes: Queue[tuple[int, T | BaseException]] = Queue()

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            outcomes.put((index, call()))
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            outcomes.put((index, error))

    for index, call in enumerate(calls):
        threading.Thread(target=run, args=(index, call), daemon=True).start()
    results: dict[int, T] = {}
    for _ in calls:
        index, outcome = outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        results[index] = outcome
    return [results[index] for index in range(len(calls))]
