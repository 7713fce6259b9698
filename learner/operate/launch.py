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
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Self

from learner.distributed.waiting import waiting_for
from learner.operate.launch_plan import LaunchPlan
from learner.operate.torchrun import SHUTDOWN_S
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.server_process import PAUSES_S, ServerProcess, SupervisedServer
from shared_contracts.cli import BAD_INPUT, RUN_FAILED
from shared_contracts.errors import ContractError, RunError

Tell = Callable[[str], object]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
    """Context manager that records SIGINT, SIGTERM and SIGHUP, in the main thread.

    SIGINT or SIGHUP stays ignored if the parent ignored it, as nohup does.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def urgent(self) -> bool:
        """Whether a second signal arrived, which ends all grace times."""
        return len(self._received) > 1

    def check(self) -> None:
        """Raise StopRequested if a signal arrived."""
        if self._received:
            raise StopRequested(self._received[0])

    def pause(self, seconds: float) -> None:
        """Sleep; raise StopRequested as soon as a signal arrives."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.1))
        self.check()

    def _record(self, number: int, _: FrameType | None) -> None:
        self._received.append(number)


class LearnerProcess:
    """torchrun with `processes` times `command`; they end with this process.

    They have a session of their own: an interrupt of the terminal reaches this process only.
    signals: a second signal ends the grace time of a stop.
    """

    def __init__(
        self,
        command: list[str],
        processes: int,
        environment: Mapping[str, str],
        signals: StopSignals,
    ) -> None:
        self._signals = signals
        torchrun = [sys.executable, "-m", "learner.operate.torchrun", str(os.getpid())]
        self._process = subprocess.Popen(
            [*torchrun, "--standalone", f"--nproc-per-node={processes}", "--", *command],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Send SIGTERM, then SIGKILL after a grace time."""
        self._process.terminate()
        end = time.monotonic() + STOP_GRACE_S
        while self.code() is None and time.monotonic() < end and not self._signals.urgent:
            time.sleep(0.05)
        self._process.kill()  # and the kernel kills its processes
        self._process.wait()

    def code(self) -> int | None:
        """Return the exit code; None while the learner runs."""
        code = self._process.poll()
        return RUN_FAILED if code is not None and code < 0 else code


@dataclass(frozen=True)
class Crew:
    """Factories of the processes. start_s, pauses_s: see `SupervisedServer`."""

    servers: Sequence[Callable[[], ServerProcess]]
    learner: Callable[[StopSignals], LearnerProcess]
    start_s: float = START_S
    pauses_s: Sequence[float] = PAUSES_S

    @classmethod
    def of(cls, plan: LaunchPlan) -> Self:
        around = plan.server_environment
        servers = [
            partial(ServerProcess, s.options, s.log, s.port, around, s.host, s.base_url, s.grace_s)
            for s in plan.servers
        ]
        learner = partial(LearnerProcess, plan.learner, plan.processes, plan.learner_environment)
        return cls(servers, learner)


def launch(crew: Crew, tell: Tell) -> int:
    """Run servers and learner; return the learner's exit code, or 128 plus a stop signal.

    tell: prints a line.

    Raises:
        ContractError: a server ended at its start because of bad input.
        RunError: a server did not become ready, or failed for good.
    """
    with StopSignals() as signals:
        try:
            with Servers(crew, signals, tell) as servers:
                servers.start()
                tell("Starting the learner")
                with crew.learner(signals) as learner:
                    return _until_the_end(learner, servers, signals, tell)
        except StopRequested as stop:
            return 128 + stop.number


def _until_the_end(
    learner: LearnerProcess, servers: "Servers", signals: StopSignals, tell: Tell
) -> int:
    try:
        while (code := learner.code()) is None:
            servers.check()
            signals.pause(_POLL_S)
    except (RunError, StopRequested) as reason:
        with suppress(OSError):  # the terminal may be gone
            tell(f"Stopping the learner ({str(reason).splitlines()[0]})")
        raise
    tell(f"The learner ended with code {code}")
    return code


class Servers:
    """Context manager of all servers of a launch; its exit stops them."""

    def __init__(self, crew: Crew, signals: StopSignals, tell: Tell) -> None:
        self._crew, self._signals, self._tell = crew, signals, tell
        self._processes: list[ServerProcess] = []
        self._supervised: list[SupervisedServer] = []

    def start(self) -> None:
        """Start all servers and wait until all are ready; later, a server that ends is restarted.

        Raises:
            ContractError: a server ended because of bad input.
            RunError: a server ended or was not ready in time; the message has its last lines.
            StopRequested: a signal arrived.
        """
        for start in self._crew.servers:
            self._processes.append(start())
        waiting, began, reason = [*self._processes], time.monotonic(), ""
        with waiting_for("the rollout servers", lambda: reason):
            while waiting:
                self._signals.pause(_POLL_S)
                for server in waiting[1:]:
                    require_running(server)
                passed = time.monotonic() - began
                if (why := why_not_ready(waiting[0])) is None:
                    self._tell(f"Ready after {passed:.0f} s: {waiting.pop(0).base_url}")
                    continue
                reason = why
                if passed > self._crew.start_s:
                    raise RunError(
                        f"the rollout server at {waiting[0].base_url} was not ready within "
                        f"{self._crew.start_s:g} s ({why}). {waiting[0].log_tail()}"
                    )
        for start, process in zip(self._crew.servers, self._processes, strict=True):
            name = f"the rollout server at {process.base_url}"
            pauses_s, start_s = self._crew.pauses_s, self._crew.start_s
            supervised = SupervisedServer(start, start_s, pauses_s, first=process, name=name)
            self._supervised.append(supervised)

    def check(self) -> None:
        """Raise RunError if a server ended too often."""
        for server in self._supervised:
            server.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Send SIGTERM to all, then SIGKILL after a grace time or a second signal."""
        with suppress(OSError):
            self._tell("Stopping the servers")
        running: Sequence[SupervisedServer | ServerProcess] = self._supervised or self._processes
        with ThreadPoolExecutor(max(len(running), 1)) as pool:
            stops = [pool.submit(server.stop) for server in running]
            while not all(stop.done() for stop in stops):
                if self._signals.urgent:
                    for server in running:
                        server.kill()
                time.sleep(_POLL_S)


def require_running(server: ServerProcess) -> None:
    """Raise if a server has ended: ContractError for bad input, else RunError."""
    if (code := server.code()) is not None:
        where, found = f"the rollout server at {server.base_url}", f"it ended with code {code}"
        if code == BAD_INPUT:
            raise ContractError(where, found, server.log_tail())
        raise RunError(f"{where}: {found}. {server.log_tail()}")


def why_not_ready(server: ServerProcess) -> str | None:
    """Return the error of a readiness call; None if the server accepts pushes.

    Raises as `require_running`.
    """
    require_running(server)
    try:
        with RolloutClient(server.base_url, _CALL_S) as client:
            client.check_pushable()
    except SERVER_ERRORS as error:
        return str(error)
    return None
