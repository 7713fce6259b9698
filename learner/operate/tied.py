"""A command that ends with the process that started it (Linux).

    python -m learner.operate.tied PARENT_PID COMMAND ...

The kernel kills it when that process dies, however that happens. Imports nothing heavy.
"""

import os
import signal
import sys

from shared_contracts.parent_death import signal_at_death_of


def tied(parent: int, command: list[str]) -> list[str]:
    """The command line that ties `command` to the process `parent`, which starts it."""
    return [sys.executable, "-m", "learner.operate.tied", str(parent), *command]


def main() -> None:
    parent, *command = sys.argv[1:]
    signal_at_death_of(int(parent), signal.SIGKILL)
    os.execvp(command[0], command)  # the kernel's promise outlives it


if __name__ == "__main__":
    main()
