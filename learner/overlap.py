"""The in-step pipeline: what comes next is made while what is there is used (STEP-03)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, Full, Queue
from typing import Generic, TypeVar

T = TypeVar("T")

_POLL_S = 0.1


class _Produced(Generic[T]):
    """One item, the error that came in its place, or the end."""

    def __init__(self, item: T | None = None, error: BaseException | None = None) -> None:
        self.item = item
        self.error = error


@contextmanager
def ahead(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """Iterate in a thread, through a queue of one: one item waits while the next is made.

    What `items` raises is raised where its next item is asked for. After the block no further
    item is begun; one that is being made is left behind, in a thread that keeps no process.
    """
    queue: Queue[_Produced[T]] = Queue(maxsize=1)
    over = threading.Event()

    def put(produced: _Produced[T]) -> None:
        while not over.is_set():
            with suppress(Full):
                queue.put(produced, timeout=_POLL_S)
                return

    def produce() -> None:
        try:
            for item in items:
                put(_Produced(item))
                if over.is_set():
                    return
            put(_Produced())
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            put(_Produced(error=error))

    threading.Thread(target=produce, daemon=True).start()
    try:
        yield _taken(queue)
    finally:
        over.set()


def _taken(queue: "Queue[_Produced[T]]") -> Iterator[T]:
    while True:
        try:
            produced = queue.get(timeout=_POLL_S)  # a signal is noticed in between
        except Empty:
            continue
        if produced.error is not None:
            raise produced.error
        if produced.item is None:
            return
        yield produced.item
