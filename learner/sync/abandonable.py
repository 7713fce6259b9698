"""Run what may hang for ever with a deadline, and let go of it when that has passed.

    run_within     one call                      run_together   a call and our half of a collective

A thread that sits in a collective cannot be cancelled. It is a daemon, so that it can be
left behind: the caller raises, lets go of the group, and the process can still end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty
from typing import Literal, TypeVar

from learner.rollout.parallel import Calls

Answer = TypeVar("Answer")
Part = Literal["call", "collective"]

# So long a call may still say why, when the collective beside it has broken.
REASON_GRACE_S = 3.0


@dataclass(frozen=True)
class Broken:
    """Which of the two broke, or was still going on at the deadline, and why."""

    part: Part
    error: BaseException


def run_within(call: Callable[[], Answer], deadline_s: float) -> Answer:
    """The answer of a call that has `deadline_s` for it.

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
    """Why the call failed, when it does so in time."""
    try:
        part, outcome = calls.take(REASON_GRACE_S)
    except Empty:
        return None
    error = outcome.exception()
    return None if error is None else Broken(part, error)
