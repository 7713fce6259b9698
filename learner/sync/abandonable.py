"""Run the two sides of a handshake at once, and let go of the one that hangs.

A thread that sits in a collective cannot be cancelled. It is a daemon, so that it can be
left behind: the caller raises, tears the group down, and the process can still end.
"""

import threading
from collections.abc import Callable
from queue import Empty, Queue


def run_together(
    first: Callable[[], None], second: Callable[[], None], deadline_s: float
) -> BaseException | None:
    """Run both callables in daemon threads and wait for both.

    Returns None when both ended well, else the first error; the other one is abandoned.
    A `TimeoutError` is returned when `deadline_s` passed first.
    """
    outcomes: Queue[BaseException | None] = Queue()

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            outcomes.put(error)
        else:
            outcomes.put(None)

    for work in (first, second):
        threading.Thread(target=run, args=(work,), daemon=True).start()
    for _ in range(2):
        try:
            error = outcomes.get(timeout=deadline_s)
        except Empty:
            return TimeoutError(f"no answer within {deadline_s:.0f} s")
        if error is not None:
            return error
    return None
