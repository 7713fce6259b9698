"""A child that does not outlive its parent (Linux)."""

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that spawned it dies.

    Does nothing outside a child of `multiprocessing`. The parent may have died before
    the kernel was asked, hence the look at who the parent is now.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)
