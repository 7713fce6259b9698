"""Children that do not outlive their parent (Linux)."""

import multiprocessing
import os
import signal

from shared_contracts.errors import ContractError
from shared_contracts.parent_death import signal_at_death_of


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that spawned it dies.

    Does nothing outside a child of `multiprocessing`.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    assert parent.pid is not None
    signal_at_death_of(parent.pid, signal.SIGKILL)


def stop_with(parent_pid: int) -> None:
    """Have the kernel send this process SIGTERM when its parent, `parent_pid`, dies.

    Raises ContractError where that is not its parent, or not any more.
    """
    if os.getppid() != parent_pid:
        raise ContractError(
            "--parent-pid",
            f"{parent_pid} is not the parent of this process, or has ended",
            "Give the pid of what starts it, or leave it out",
        )
    signal_at_death_of(parent_pid, signal.SIGTERM)
