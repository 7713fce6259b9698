"""Child processes and their ends, and the scratch folder (Linux)."""

import multiprocessing
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from shared_contracts.errors import ContractError
from shared_contracts.machine import signal_at_death_of


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
            "Give the pid of the process that starts the server, or leave it out",
        )
    signal_at_death_of(parent_pid, signal.SIGTERM)


def kill_children(thread: int) -> None:
    """Kill the processes that a thread started with `multiprocessing`. thread: its native id."""
    started = Path(f"/proc/self/task/{thread}/children").read_text().split()
    for child in multiprocessing.active_children():
        if str(child.pid) in started:
            child.kill()


# Removes a folder when the process that holds the other end of its input ends, however it does.
_REMOVE = 'trap "" INT TERM HUP; cat > /dev/null; rm -rf -- "$0"'
_SHARED_MEMORY = "/dev/shm"
_kept: list[subprocess.Popen[bytes]] = []


def use_scratch_folder() -> Path:
    """Make a folder that no other user reads, and have all temporary files lie in it.

    Sockets of the engines and merged checkpoints are among them. Processes that are started
    afterwards take it over.
    """
    folder = _removed_afterwards(tempfile.mkdtemp(prefix="rollout-server-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return folder


def memory_folder() -> Path:
    """Make a folder in memory, or with all temporary files on a machine without `/dev/shm`."""
    if not os.access(_SHARED_MEMORY, os.W_OK):
        return Path(tempfile.mkdtemp())
    return _removed_afterwards(tempfile.mkdtemp(prefix="rollout-server-", dir=_SHARED_MEMORY))


def _removed_afterwards(folder: str) -> Path:
    """Have the folder removed when this process ends, in whatever way."""
    remover = ["sh", "-c", _REMOVE, folder]
    _kept.append(subprocess.Popen(remover, stdin=subprocess.PIPE, start_new_session=True))
    return Path(folder)
