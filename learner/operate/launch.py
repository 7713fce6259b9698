"""Servers and learner of one machine, started one after the other and stopped together (DEP-02).

    servers start -> all are ready -> the learner trains
        -> it ends, a server ends for good, or a signal comes
        -> the learner is stopped, then the servers

Whatever becomes of this process, nothing that it has started is left: the kernel ends them
with it.
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
# torchrun kills what does not end in its own time.
STOP_GRACE_S = SHUTDOWN_S + 10.0
# Imports, weights, and on GPUs the capture of graphs.
START_S = 900.0
# One call of a server takes at most so long.
_CALL_S = 2.0
_POLL_S = 0.2


class StopRequested(Exception):
    """A signal came. number: which one."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGHUP while entered, in the main thread.

    A SIGINT or SIGHUP that the process inherited as ignored, as from nohup, stays ignored.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def urgent(self) -> bool:
        """A second signal came: there is no time for a grace."""
        return len(self._came) > 1

    def check(self) -> None:
        """Raises StopRequested once a signal came."""
        if self._came:
            raise StopRequested(self._came[0])

    def pause(self, seconds: float) -> None:
        """Sleep; raises StopRequested as soon as a signal came."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.1))
        self.check()

    def _note(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)


class LearnerProcess:
    """`command` in so many processes, with this process's output; all end with this process.

    In a session of their own, so that an interrupt of the terminal reaches this process alone.
    signals: a second one cuts the grace of a stop short.
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
        """SIGTERM, then SIGKILL after a grace time."""
        self._process.terminate()
        end = time.monotonic() + STOP_GRACE_S
        while self.code() is None and time.monotonic() < end and not self._signals.urgent:
            time.sleep(0.05)
        self._process.kill()  # and the kernel kills its processes
        self._process.wait()

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        code = self._process.poll()
        return RUN_FAILED if code is not None and code < 0 else code


@dataclass(frozen=True)
class Crew:
    """What is started. servers: each on a port of its own.

    start_s, pauses_s: see `SupervisedServer`.
    """

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
    """Run it all; returns the learner's exit code, or 128 and the signal that ended it.

    tell: prints a line.

    Raises:
        ContractError: a server ended at its start, because of bad input.
        RunError: a server did not become ready, or ended for good.
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
    """All servers of a launch; none is left when this is."""

    def __init__(self, crew: Crew, signals: StopSignals, tell: Tell) -> None:
        self._crew, self._signals, self._tell = crew, signals, tell
        self._processes: list[ServerProcess] = []
        self._kept: list[SupervisedServer] = []

    def start(self) -> None:
        """Start all and wait until all are ready; from then on one that ends is started again.

        Raises:
            ContractError: one ended, because of bad input.
            RunError: one ended, or was not ready in time; both show its last lines.
            StopRequested: a signal came.
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
                    late = waiting[0]
                    raise RunError(
                        f"the rollout server at {late.base_url} was not ready within "
                        f"{self._crew.start_s:g} s ({why}). {late.log_tail()}"
                    )
        for start, process in zip(self._crew.servers, self._processes, strict=True):
            name = f"the rollout server at {process.base_url}"
            pauses_s, start_s = self._crew.pauses_s, self._crew.start_s
            self._kept.append(SupervisedServer(start, start_s, pauses_s, first=process, name=name))

    def check(self) -> None:
        """Raises RunError once a server ended too often."""
        for server in self._kept:
            server.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """SIGTERM to all at once, SIGKILL after a grace time or with a second signal."""
        with suppress(OSError):
            self._tell("Stopping the servers")
        running: Sequence[SupervisedServer | ServerProcess] = self._kept or self._processes
        with ThreadPoolExecutor(max(len(running), 1)) as pool:
            stops = [pool.submit(server.stop) for server in running]
            while not all(stop.done() for stop in stops):
                if self._signals.urgent:
                    for server in running:
                        server.kill()
                time.sleep(_POLL_S)


def require_running(server: ServerProcess) -> None:
    """Raise ContractError or RunError when it has ended."""
    if (code := server.code()) is not None:
        where, found = f"the rollout server at {server.base_url}", f"it ended with code {code}"
        if code == BAD_INPUT:
            raise ContractError(where, found, server.log_tail())
        raise RunError(f"{where}: {found}. {server.log_tail()}")


def why_not_ready(server: ServerProcess) -> str | None:
    """The error of a call; None: it can be pushed to. Raises as `require_running`."""
    require_running(server)
    try:
        with RolloutClient(server.base_url, _CALL_S) as client:
            client.check_pushable()
    except SERVER_ERRORS as error:
        return str(error)
    return None
