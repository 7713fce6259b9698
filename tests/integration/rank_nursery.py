"""Learner processes that start in a second: forked from one that has imported everything.

    python -m tests.integration.rank_nursery

Per line of JSON {"config", "ranks", "log"}: forks `ranks` processes of `learner train` and prints
{"pids": [...]}. Prints {"pid", "code"} of each process that ends. Ends with its input, and its
processes with it.
"""

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

import learner.training.train  # noqa: F401 - what takes the time
from learner.cli import main as learner_main
from learner.rollout.server_process import free_ports

POLL_S = 0.02


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def become_rank(rank: int, ranks: int, port: int, config: str, log: Path) -> None:
    """In the new process: `learner train`, as torchrun would have started it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["learner", "train", "--config", config]
    code = 0
    try:
        learner_main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - printed as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def report_ends() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        say(pid=pid, code=os.waitstatus_to_exitcode(status))


def start(config: str, ranks: int, log: Path) -> list[int]:
    (port,) = free_ports(1)
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, ranks, port, config, log.with_suffix(f".{rank}.log"))
        pids.append(pid)
    return pids


def main() -> None:
    """One thread: a fork takes no other along."""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        report_ends()
        if not readable:
            continue
        if not (line := sys.stdin.readline()):
            return
        wanted = json.loads(line)
        say(pids=start(wanted["config"], wanted["ranks"], Path(wanted["log"])))


if __name__ == "__main__":
    main()
