"""Learner processes that start in a second: forked from one that has imported everything.

    python -m tests.integration.rank_nursery

Per line of JSON {"words", "folder", "ranks", "log", "moment"}: forks `ranks` processes of `learner`
with these words, and prints {"pids": [...]}. Prints {"pid", "code"} of each process that ends. Ends
with its input, and its processes with it.

moment: when a process kills itself; [], or [event, ending, seconds]: so many seconds after its
first audit event of this name (such as `open` or `os.rename`) on a path with this ending.
"""

import json
import os
import select
import signal
import sys
import threading
from typing import Any

import learner.training.train  # noqa: F401 - what takes the time
from learner.cli import main as learner_main
from learner.rollout.server_process import free_ports

POLL_S = 0.02


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def kill_at(event: str, ending: str, seconds: float) -> None:
    """SIGKILL: nothing is flushed, closed or removed."""
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.daemon = True

    def hook(seen: str, arguments: tuple[object, ...]) -> None:
        if seen == event and str(arguments[0]).endswith(ending) and not timer.is_alive():
            if seconds:
                timer.start()
            else:
                timer.function()

    sys.addaudithook(hook)


def become_rank(rank: int, port: int, wanted: dict[str, Any]) -> None:
    """Run `learner` in this new process, with torchrun's variables for several ranks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks, log = wanted["ranks"], f"{wanted['log']}.{rank}.log"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    if ranks > 1:
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(wanted["folder"])
    sys.argv = ["learner", *wanted["words"]]
    if wanted["moment"]:
        kill_at(*wanted["moment"])
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


def start(wanted: dict[str, Any]) -> list[int]:
    (port,) = free_ports(1)
    pids = []
    for rank in range(wanted["ranks"]):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, port, wanted)
        pids.append(pid)
    return pids


def main() -> None:
    """Start processes on demand. There is one thread, because a fork copies no other."""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        report_ends()
        if not readable:
            continue
        if not (line := sys.stdin.readline()):
            return
        say(pids=start(json.loads(line)))


if __name__ == "__main__":
    main()
