"""Blocking calls in daemon threads, which can be left behind.

    in_parallel    several calls at once
    run_within     one call with a deadline
    run_together   a call and the learner's half of a collective, with a deadline

A thread inside a collective cannot be cancelled. The caller raises and abandons the group, and
the process can still end.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Generic, Literal, TypeVar

K = TypeVar("K")
T = TypeVar("T")
Part = Literal["call", "collective"]

# When the collective has failed, the call beside it has so long to fail with the reason.
REASON_GRACE_S = 3.0


class Calls(Generic[K, T]):
    """Calls that run at the same time; they are taken in the order in which they end."""

    def __init__(self) -> None:
        self._ended: Queue[tuple[K, Future[T]]] = Queue()

    def start(self, key: K, call: Callable[[], T]) -> None:
        """Start a call. key: returned with its result."""

        def run() -> None:
            outcome: Future[T] = Future()
            try:
                outcome.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
                outcome.set_exception(error)
            self._ended.put((key, outcome))

        threading.Thread(target=run, daemon=True).start()

    def take(self, timeout_s: float | None = None) -> tuple[K, Future[T]]:
        """Return the next call that has ended; its future has the result or the error.

        Raises `queue.Empty` when none ends within `timeout_s`.
        """
        return self._ended.get(timeout=timeout_s)


def in_parallel(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of the calls, in order; raise the first error as soon as it happens.

    After an error or an interrupt, calls that still run are left behind.
    """
    running: Calls[int, T] = Calls()
    for index, call in enumerate(calls):
        running.start(index, call)
    ended = (running.take() for _ in calls)
    results = {index: outcome.result() for index, outcome in ended}
    return [results[index] for index in range(len(calls))]


@dataclass(frozen=True)
class Broken:
    """The part that failed, or was still running at the deadline, and the error."""

    part: Part
    error: BaseException


def run_within(call: Callable[[], T], deadline_s: float) -> T:
    """Return the result of a call.

    Raises TimeoutError when there is none within `deadline_s`, and what the call raises.
    """
    running: Calls[None, T] = Calls()
    running.start(None, call)
    try:
        return running.take(deadline_s)[1].result()
    except Empty:
        raise TimeoutError(f"no end within {deadline_s:g} s") from None


def run_together(
    call: Callable[[], object], collective: Callable[[], object], deadline_s: float
) -> Broken | None:
    """Run a call of the server and the learner's half of a collective in daemon threads.

    Returns None when both ended well, else what failed; what still runs is abandoned. If the
    collective fails first, the call has `REASON_GRACE_S` to fail too and is then the one
    returned, because the server knows the reason. After `deadline_s` the error is a
    TimeoutError, of the call if it has not ended.
    """
    calls: Calls[Part, object] = Calls()
    calls.start("call", call)
    calls.start("collective", collective)
    deadline = time.monotonic() + deadline_s
    running: list[Part] = ["call", "collective"]
    failed: Broken | None = None
    while running:
        try:
            part, outcome = calls.take(max(0.0, deadline - time.monotonic()))
        except Empty:
            return failed or Broken(running[0], TimeoutError(f"no end within {deadline_s:g} s"))
        running.remove(part)
        error = outcome.exception()
        if error is not None and part == "call":
            return Broken(part, error)
        if error is not None:
            failed, deadline = Broken(part, error), time.monotonic() + REASON_GRACE_S
    return failed
