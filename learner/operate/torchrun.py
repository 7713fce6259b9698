"""torchrun that keeps the learner's exit code and leaves no process.

    python -m learner.operate.torchrun PARENT_PID|- OPTION ... -- COMMAND ...
    python -m learner.operate.torchrun exec PARENT_PID COMMAND ...   without torchrun

torchrun itself ends with 1 and a traceback whatever its processes end with, and they outlive it
when it is killed. Here they end with it, and its exit code is that of the first process that
failed. It ends with the process PARENT_PID, which started it; with - it stays when that ends, as
a script does whose shell is left.
"""

import logging
import os
import signal
import sys

from shared_contracts.cli import RUN_FAILED
from shared_contracts.machine import signal_at_death_of

# How long the processes may take to end after SIGTERM.
SHUTDOWN_S = 15


def die_with_parent(parent: int, command: list[str]) -> list[str]:
    """The command line that runs `command` until the process `parent`, which starts it, ends.

    The kernel kills it when that process dies, however that happens (Linux).
    """
    return [sys.executable, "-m", "learner.operate.torchrun", "exec", str(parent), *command]


def main() -> None:
    parent, *rest = sys.argv[1:]
    if parent == "exec":
        parent, *command = rest
        signal_at_death_of(int(parent), signal.SIGKILL)
        os.execvp(command[0], command)  # the kernel's promise outlives it
    if parent != "-":
        signal_at_death_of(int(parent), signal.SIGTERM)
    end = rest.index("--")
    sys.exit(run(rest[:end], rest[end + 1 :]))


def run(options: list[str], command: list[str]) -> int:
    """Run `command` in processes by torchrun's `options`; returns an exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # Every process tells its own error, and how one was ended is told below.
    logging.disable(logging.ERROR)
    own = [f"--shutdown-timeout={SHUTDOWN_S}", "--no-python"]
    try:
        torchrun([*options, *own, *die_with_parent(os.getpid(), command)])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        print(f"error: learner process {rank} was ended by {name}", file=sys.stderr)
        return RUN_FAILED
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


if __name__ == "__main__":
    main()
