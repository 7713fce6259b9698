"""Which process writes a run folder, so that whoever reads it can tell whether it still lives.

mark_of_this()   in run.json
lives(mark)      asked later, by anybody
"""

import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


def mark_of_this() -> dict[str, Any]:
    """host, pid and start of this process, and the pid namespace that the pid is of.

    Hosts may share a name, and the first namespace of every host has the same number: `boot_id`
    tells them apart.
    """
    return {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid": os.getpid(),
        "pid_namespace": _namespace(),
        "start_ticks": _start_ticks(os.getpid()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def lives(mark: dict[str, Any]) -> bool | None:
    """None where it cannot be seen from here: another host, or another container.

    Also where the host was started again. A mark of an earlier version has no `boot_id`.
    """
    here = (socket.gethostname(), _namespace())
    if None in here or (mark.get("host"), mark.get("pid_namespace")) != here:
        return None
    if "boot_id" in mark and mark["boot_id"] != _boot_id():
        return None
    return bool(_start_ticks(mark["pid"]) == mark["start_ticks"])


def _namespace() -> str | None:
    """Linux only."""
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return None


def _boot_id() -> str | None:
    """Of this start of the kernel, in every container on it; Linux only."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _start_ticks(pid: int) -> int | None:
    """When it was started, after the start of the machine; None where there is none, or a zombie.

    A pid that another process has by now has another start.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before may have spaces
    return None if state == "Z" else int(fields[18])
