"""Run the two sides of a handshake at once, and let go of the one that hangs.

A thread that sits in a collective cannot be cancelled. It is a daemon, so that it can be
left behind: the caller raises, tears the group down, and the process can still end.
"""

import threading
import time
from collections.abc import Callable
from queue import Empty, Queue

# So long a call may still say why, when the collective beside it has broken.
REASON_GRACE_S = 3.0


def run_together(
    call: Callable[[], object], collective: Callable[[], object], deadline_s: float
) -> BaseException | None:
    """Run a call of the other side and our half of a collective in daemon threads.

    Returns None when both ended well, else the error; what still runs is abandoned. When
    the collective breaks, the call has `REASON_GRACE_S` to fail too, and its error is the
    one returned: the other side knows why it hung up. A `TimeoutError` is returned when
    `deadline_s` passed first.
    """
    outcomes: Queue[tuple[bool, BaseException | None]] = Queue()
    deadline = time.monotonic() + deadline_s

    def run(work: Callable[[], object], is_call: bool) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            outcomes.put((is_call, error))
        else:
            outcomes.put((is_call, None))

    for work in (call, collective):
        threading.Thread(target=run, args=(work, work is call), daemon=True).start()
    for left in (1, 0):
        try:
            is_call, error = outcomes.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return TimeoutError(f"no answer within {deadline_s:g} s")
        if error is not None:
            return error if is_call or not left else _reason(outcomes) or error
    return None


def _reason(outcomes: Queue[tuple[bool, BaseException | None]]) -> BaseException | None:
    try:
        return outcomes.get(timeout=REASON_GRACE_S)[1]
    except Empty:
        return None
