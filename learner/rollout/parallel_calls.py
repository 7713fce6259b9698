"""Blocking calls in daemon threads, which can be left behind.

    in_parallel    several calls at once        run_within     one call with a deadline
    run_together   a call and our half of a collective, with a deadline

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


class Calls(Generic[K, T]):
    """Calls that run at the same time; they are taken in the order in which they end.

    The threads are daemons: calls that still wait for their servers can be left behind.
    """

    def __init__(self) -> None:
        self._ended: Queue[tuple[K, Future[T]]] = Queue()

    def start(self, key: K, call: Callable[[], T]) -> None:
        """Start a call. key: returned with its result."""
        threading.Thread(target=self._run, args=(key, call), daemon=True).start()

    def take(self, timeout_s: float | None = None) -> tuple[K, Future[T]]:
        """Return the next call that has ended; its future has the result or the error.

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
    """Return the results of the calls, in order; raise the first error as soon as it happens.

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


Answer = TypeVar("Answer")
Part = Literal["call", "collective"]

# So long a call may still say why, when the collective beside it has broken.
REASON_GRACE_S = 3.0


@dataclass(frozen=True)
class Broken:
    """The part that failed, or was still running at the deadline, and the error."""

    part: Part
    error: BaseException


def run_within(call: Callable[[], Answer], deadline_s: float) -> Answer:
    """Return the result of a call, within `deadline_s`.

    Raises TimeoutError when there is none by then, and what the call raises.
    """
    answers: list[Answer] = []
    broken = run_together(lambda: answers.append(call()), None, deadline_s)
    if broken is not None:
        raise broken.error
    return answers[0]


def run_together(
    call: Callable[[], object], collective: Callable[[], object] | None, deadline_s: float
) -> Broken | None:
    """Run a call of the other side and our half of a collective in daemon threads.

    Returns None when both ended well, else what broke; what still runs is abandoned. When
    the collective breaks, the call has `REASON_GRACE_S` to fail too, and is the one returned:
    the other side knows why it hung up. When `deadline_s` has passed, the error is a
    TimeoutError, of the call if that has not ended.
    """
    works: dict[Part, Callable[[], object]] = {"call": call}
    if collective is not None:
        works["collective"] = collective
    calls: Calls[Part, object] = Calls()
    for part, work in works.items():
        calls.start(part, work)
    deadline = time.monotonic() + deadline_s
    running = list(works)
    while running:
        try:
            part, outcome = calls.take(max(0.0, deadline - time.monotonic()))
        except Empty:
            return Broken(running[0], TimeoutError(f"no end within {deadline_s:g} s"))
        running.remove(part)
        if (error := outcome.exception()) is not None:
            return (_reason(calls) if running == ["call"] else None) or Broken(part, error)
    return None


def _reason(calls: Calls[Part, object]) -> Broken | None:
    """Return why the call failed, if it fails in time."""
    try:
        part, outcome = calls.take(REASON_GRACE_S)
    except Empty:
        return None
    error = outcome.exception()
    return None if error is None else Broken(part, error)
