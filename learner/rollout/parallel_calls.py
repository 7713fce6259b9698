"""Blocking calls in daemon threads, which can be left behind.

    in_thread      one call
    in_parallel    several calls at once
    run_together   a call and the learner's half of a collective, with a deadline

A thread inside a collective cannot be cancelled. The caller raises and abandons the group, and
the process can still end, which it cannot with the threads of a `ThreadPoolExecutor`.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, as_completed, wait
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")

# When the collective has failed, the call beside it has so long to fail with the reason.
REASON_GRACE_S = 3.0


def in_thread(call: Callable[[], T]) -> Future[T]:
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def in_parallel(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of the calls, in order; raise the first error as soon as it happens.

    After an error or an interrupt, calls that still run are left behind.
    """
    outcomes = [in_thread(call) for call in calls]
    for outcome in as_completed(outcomes):
        outcome.result()
    return [outcome.result() for outcome in outcomes]


@dataclass(frozen=True)
class Broken:
    """The part that failed, or was still running at the deadline, and the error."""

    part: Literal["call", "collective"]
    error: BaseException


def run_together(
    call: Callable[[], object], collective: Callable[[], object], deadline_s: float
) -> Broken | None:
    """Run a call of the server and the learner's half of a collective in daemon threads.

    Returns None when both ended well, else what failed; what still runs is abandoned. If the
    collective fails first, the call has `REASON_GRACE_S` to fail too and is then the one
    returned, because the server knows the reason. After `deadline_s` the error is a
    TimeoutError, of the call if it has not ended.
    """
    late = TimeoutError(f"no end within {deadline_s:g} s")
    called, collected = in_thread(call), in_thread(collective)
    wait([called, collected], deadline_s, FIRST_EXCEPTION)
    if collected.done() and collected.exception() is not None:
        wait([called], REASON_GRACE_S)
    if called.done() and (error := called.exception()) is not None:
        return Broken("call", error)
    if collected.done() and (error := collected.exception()) is not None:
        return Broken("collective", error)
    if not called.done():
        return Broken("call", late)
    return None if collected.done() else Broken("collective", late)
