"""torchrun that keeps the learner's exit code and leaves no process.

    python -m learner.operate.torchrun PARENT_PID|- OPTION ... -- COMMAND ...
    python -m learner.operate.torchrun exec PARENT_PID COMMAND ...   without torchrun

torchrun itself exits with 1 and a traceback if any process fails, and its processes survive if it
is killed. Here the processes end with torchrun, and the exit code is that of the first process
that failed. torchrun ends with its parent process PARENT_PID; with `-` it is independent.
"""

import logging
import os
import signal
import sys

from shared_contracts.cli import RUN_FAILED
from shared_contracts.machine import signal_at_death_of

# Grace time of the processes after SIGTERM.
SHUTDOWN_S = 15


def die_with_parent(parent: int, command: list[str]) -> list[str]:
    """Return a command line for `command` whose process the kernel kills when `parent` ends.

    parent: the pid of the process that starts it. Linux only.
    """
    return [sys.executable, "-m", "learner.operate.torchrun", "exec", str(parent), *command]


def main() -> None:
    parent, *rest = sys.argv[1:]
    if parent == "exec":
        parent, *command = rest
        signal_at_death_of(int(parent), signal.SIGKILL)
        os.execvp(command[0], command)  # exec keeps the parent-death signal
    if parent != "-":
        signal_at_death_of(int(parent), signal.SIGTERM)
    end = rest.index("--")
    sys.exit(run(rest[:end], rest[end + 1 :]))


def run(options: list[str], command: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # Each process prints its own error; a signal is printed below.
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
