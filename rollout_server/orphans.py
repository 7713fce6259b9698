"""Children that do not outlive their parent (Linux)."""

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that spawned it dies.

    Does nothing outside a child of `multiprocessing`.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    assert parent.pid is not None
    _signal_at_death_of(parent.pid, signal.SIGKILL)


def stop_with(parent_pid: int) -> None:
    """Have the kernel send this process SIGTERM when its parent, `parent_pid`, dies."""
    _signal_at_death_of(parent_pid, signal.SIGTERM)


def _signal_at_death_of(parent_pid: int, number: signal.Signals) -> None:
    """The parent may have died before the kernel was asked: then end on the spot."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os._exit(1)
