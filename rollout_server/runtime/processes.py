"""Child processes, and the scratch folder (Linux)."""

import multiprocessing
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from shared_contracts.errors import ContractError
from shared_contracts.machine import signal_at_death_of


def stop_with(parent_pid: int) -> None:
    """Make the kernel send this process SIGTERM when its parent, `parent_pid`, dies.

    Raises ContractError if `parent_pid` is not its parent, or has ended.
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


# Removes a folder at the end of its stdin, which the kernel closes when the server ends.
_REMOVE = 'trap "" INT TERM HUP; cat > /dev/null; rm -rf -- "$0"'
_SHARED_MEMORY = "/dev/shm"
_removers: list[subprocess.Popen[bytes]] = []


def use_scratch_folder() -> Path:
    """Make a private folder for all temporary files of this process and its later children.

    It contains sockets of the engines and merged checkpoints.
    """
    folder = _removed_afterwards(tempfile.mkdtemp(prefix="rollout-server-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return folder


def memory_folder() -> Path:
    """Make a folder in `/dev/shm`, or in the temporary folder of a machine without it."""
    if not os.access(_SHARED_MEMORY, os.W_OK):
        return Path(tempfile.mkdtemp())
    return _removed_afterwards(tempfile.mkdtemp(prefix="rollout-server-", dir=_SHARED_MEMORY))


def _removed_afterwards(folder: str) -> Path:
    """Start a process that removes the folder after the end of this process, even by SIGKILL."""
    command = ["sh", "-c", _REMOVE, folder]
    _removers.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
    return Path(folder)
