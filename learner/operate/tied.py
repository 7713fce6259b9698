"""A command that ends with the process that started it (Linux).

    python -m learner.operate.tied PARENT_PID COMMAND ...

The kernel kills it when that process dies, however that happens. Imports nothing heavy.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies.

    The parent may have died before the kernel was asked: then end on the spot.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def tied(parent: int, command: list[str]) -> list[str]:
    """The command line that ties `command` to the process `parent`, which starts it."""
    return [sys.executable, "-m", "learner.operate.tied", str(parent), *command]


def main() -> None:
    parent, *command = sys.argv[1:]
    end_with(int(parent), signal.SIGKILL)
    os.execvp(command[0], command)  # the kernel's promise outlives it


if __name__ == "__main__":
    main()
