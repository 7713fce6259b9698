"""A process that does not outlive the one that started it (Linux)."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def signal_at_death_of(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent, `parent_pid`, dies.

    The parent may have died before the kernel was asked: then end on the spot.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os._exit(1)
