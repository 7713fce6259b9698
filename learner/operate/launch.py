"""Start and stop of the servers and the learner on one machine (DEP-02).

    servers start -> all are ready -> the learner trains
        -> the learner ends, a server fails for good, or a signal arrives
        -> the learner is stopped, then the servers

If this process is killed, the kernel kills its children (parent-death signal).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from learner.distributed.waiting import waiting_for
from learner.operate.torchrun import SHUTDOWN_S
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.server_process import PAUSES_S, ServerProcess, SupervisedServer
from shared_contracts.cli import RUN_FAILED
from shared_contracts.errors import RunError

Tell = Callable[[str], object]

# Longer than the grace time after which torchrun itself kills.
STOP_GRACE_S = SHUTDOWN_S + 10.0
# Imports, weights, and on GPUs the capture of graphs.
START_S = 900.0
# Timeout of a readiness call.
_CALL_S = 2.0
_POLL_S = 0.2


class StopRequested(Exception):
    """A stop signal arrived. number: the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP of this process from now on, in the main thread.

    A signal stays ignored if the parent ignored it, as nohup does.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._received.append(number))

    def pause(self, seconds: float = _POLL_S) -> None:
        """Sleep; raise StopRequested if a signal has arrived."""
        time.sleep(seconds)
        if self._received:
            raise StopRequested(self._received[0])


def start_learner(
    command: list[str], processes: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start torchrun with `processes` times `command`; they end with this process.

    They have a session of their own: an interrupt of the terminal reaches this process only.
    """
    torchrun = [sys.executable, "-m", "learner.operate.torchrun", str(os.getpid())]
    return subprocess.Popen(
        [*torchrun, "--standalone", f"--nproc-per-node={processes}", "--", *command],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def launch(
    starts: Sequence[Callable[[], ServerProcess]],
    learner: Callable[[], subprocess.Popen[bytes]],
    tell: Tell,
    pauses_s: Sequence[float] = PAUSES_S,
) -> int:
    """Run servers and learner; return the learner's exit code, or 128 plus a stop signal.

    A server that ends while the learner runs is restarted.

    starts: a function for each server, which starts it. learner: starts the learner. tell: prints
    a line. pauses_s: of `SupervisedServer`.

    Raises:
        ContractError: a server ended at its start, or did not become ready.
        RunError: a server failed for good.
    """
    signals, processes = StopSignals(), list[ServerProcess]()
    running: Sequence[ServerProcess | SupervisedServer] = processes
    try:
        for start in starts:
            processes.append(start())
        _wait_until_ready(processes, signals, tell)
        running = servers = [
            SupervisedServer(start, START_S, pauses_s, first=first)
            for start, first in zip(starts, processes, strict=True)
        ]
        tell("Starting the learner")
        return _run_learner(learner(), servers, signals, tell)
    except StopRequested as stop:
        return 128 + stop.number
    finally:
        with suppress(OSError):  # the terminal may be gone
            tell("Stopping the servers")
        with ThreadPoolExecutor(max(len(running), 1)) as pool:
            for server in running:
                pool.submit(server.stop)


def _run_learner(
    learner: subprocess.Popen[bytes],
    servers: Sequence[SupervisedServer],
    signals: StopSignals,
    tell: Tell,
) -> int:
    """Return the learner's exit code; stop it if a server fails for good or a signal arrives."""
    try:
        while learner.poll() is None:
            for server in servers:
                server.check()
            signals.pause()
        code = learner.returncode if learner.returncode >= 0 else RUN_FAILED
        tell(f"The learner ended with code {code}")
        return code
    except (RunError, StopRequested) as reason:
        with suppress(OSError):
            tell(f"Stopping the learner ({str(reason).splitlines()[0]})")
        raise
    finally:
        learner.terminate()
        with suppress(subprocess.TimeoutExpired):
            learner.wait(STOP_GRACE_S)
        learner.kill()  # and the kernel kills its processes
        learner.wait()


def _wait_until_ready(servers: Sequence[ServerProcess], signals: StopSignals, tell: Tell) -> None:
    """Wait until every server accepts pushes.

    Raises:
        ContractError: a server ended or was not ready in time; the message has its last lines.
        StopRequested: a signal arrived.
    """
    began, waiting, reason = time.monotonic(), list(servers), ""
    with waiting_for("the rollout servers", lambda: reason):
        while waiting:
            signals.pause()
            for server in servers:
                if (code := server.code()) is not None:
                    raise server.failure(f"it ended with code {code}")
            passed, server = time.monotonic() - began, waiting[0]
            try:
                RolloutClient(server.base_url, _CALL_S).check_pushable()
            except SERVER_ERRORS as error:
                reason = str(error)
                if passed > START_S:
                    raise server.failure(f"not ready within {START_S:g} s ({reason})") from error
                continue
            tell(f"Ready after {passed:.0f} s: {server.base_url}")
            waiting.pop(0)
