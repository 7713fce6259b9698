"""torchrun on one machine, which ends with its parent and keeps the learner's exit code.

    python -m learner.operate.torchrun PARENT_PID PROCESSES COMMAND ...

torchrun itself ends with 1 and a traceback whatever its processes end with, and they outlive it
when it is killed. Here they end with it, it ends with the process that started it, and its exit
code is that of the first process that failed.
"""

import logging
import os
import signal
import sys

from learner.operate.tied import end_with, tied
from shared_contracts.cli import RUN_FAILED

# How long the processes may take to end after SIGTERM.
SHUTDOWN_S = 15


def main() -> None:
    parent, processes, *command = sys.argv[1:]
    end_with(int(parent), signal.SIGTERM)
    sys.exit(run(int(processes), command))


def run(processes: int, command: list[str]) -> int:
    """Run `command` in so many processes; returns an exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # Every process tells its own error, and how one was ended is told below.
    logging.disable(logging.ERROR)
    options = ["--standalone", f"--nproc-per-node={processes}", f"--shutdown-timeout={SHUTDOWN_S}"]
    try:
        torchrun([*options, "--no-python", *tied(os.getpid(), command)])
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
