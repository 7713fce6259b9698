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
from learner.operate.launch_plan import LaunchPlan, ServerPlan
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
# One look at a server takes at most so long.
_ASKED_S = 2.0
_POLL_S = 0.2


class StopAsked(Exception):
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
        """Raises StopAsked once a signal came."""
        if self._came:
            raise StopAsked(self._came[0])

    def pause(self, seconds: float) -> None:
        """Sleep; raises StopAsked as soon as a signal came."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.1))
        self.check()

    def _note(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)


class LearnerProcess:
    """`command` in so many processes, with this process's output; all end with this process.

    In a session of their own, so that an interrupt of the terminal is this process's alone to
    act on. asked: a second signal cuts the grace of a stop short.
    """

    def __init__(
        self, command: list[str], processes: int, environment: Mapping[str, str], asked: StopSignals
    ) -> None:
        self._asked = asked
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
        self.stop()

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        code = self._process.poll()
        return RUN_FAILED if code is not None and code < 0 else code

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after a grace time; idempotent."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        end = time.monotonic() + STOP_GRACE_S
        while self._process.poll() is None and time.monotonic() < end and not self._asked.urgent:
            time.sleep(0.05)
        self._process.kill()  # and the kernel kills its processes
        self._process.wait()


def wait_until_ready(
    servers: Sequence[ServerProcess],
    timeout_s: float,
    asked: StopSignals,
    tell: Tell,
) -> None:
    """Wait until each can be pushed to, and tell of it.

    Raises:
        ContractError: one ended, as it was told something wrong.
        RunError: one ended, or was not ready in time; both show its last lines.
        StopAsked: a signal came.
    """
    reasons: dict[ServerProcess, str] = {}
    waiting, began = list(servers), time.monotonic()
    with waiting_for("the rollout servers", lambda: "; ".join(tuple(reasons.values()))):
        while waiting:
            for server in tuple(waiting):
                asked.check()
                reason = why_not_ready(server)
                if reason is not None:
                    reasons[server] = reason
                    continue
                waiting.remove(server)
                reasons.pop(server, None)
                tell(f"Ready after {time.monotonic() - began:.0f} s: {server.base_url}")
            if waiting and time.monotonic() - began > timeout_s:
                late = waiting[0]
                raise RunError(
                    f"the rollout server at {late.base_url} was not ready within {timeout_s:g} s "
                    f"({reasons[late]}). {late.log_tail()}"
                )
            asked.pause(_POLL_S if waiting else 0.0)


def why_not_ready(server: ServerProcess) -> str | None:
    """What it says, or that it says nothing yet; None: it is ready.

    Raises ContractError or RunError when it has ended.
    """
    if (code := server.code()) is not None:
        where, found = f"the rollout server at {server.base_url}", f"it ended with code {code}"
        if code == BAD_INPUT:
            raise ContractError(where, found, server.log_tail())
        raise RunError(f"{where}: {found}. {server.log_tail()}")
    try:
        with RolloutClient(server.base_url, _ASKED_S) as client:
            client.check_pushable()
    except SERVER_ERRORS as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Crew:
    """What is started. servers: each on a port of its own. learner: hears of second signals.

    start_s, pauses_s: see `SupervisedServer`.
    """

    servers: Sequence[Callable[[], ServerProcess]]
    learner: Callable[[StopSignals], LearnerProcess]
    start_s: float = START_S
    pauses_s: Sequence[float] = PAUSES_S


def crew_of(plan: LaunchPlan) -> Crew:
    return Crew(
        [partial(_start_server, server, plan) for server in plan.servers],
        partial(LearnerProcess, plan.learner, plan.processes, plan.learner_environment),
    )


def _start_server(server: ServerPlan, plan: LaunchPlan) -> ServerProcess:
    at = server.listen
    return ServerProcess(
        server.options,
        server.log,
        at.port,
        plan.server_environment,
        at.host,
        at.base_url,
        server.grace_s,
    )


def launch(crew: Crew, tell: Tell) -> int:
    """Run it all; returns the learner's exit code, or 128 and the signal that ended it.

    tell: what goes on, in lines.

    Raises:
        ContractError: a server ended at its start, as it was told something wrong.
        RunError: a server did not become ready, or ended for good.
    """
    with StopSignals() as asked:
        try:
            with Servers(crew, asked, tell) as servers:
                servers.start()
                tell("Starting the learner")
                with crew.learner(asked) as learner:
                    return _until_the_end(learner, servers, asked, tell)
        except StopAsked as stop:
            return 128 + stop.number


def _until_the_end(
    learner: LearnerProcess, servers: "Servers", asked: StopSignals, tell: Tell
) -> int:
    try:
        while (code := learner.code()) is None:
            servers.check()
            asked.pause(_POLL_S)
    except (RunError, StopAsked) as reason:
        with suppress(OSError):  # the terminal may be gone
            (line, *_) = str(reason).splitlines()
            tell(f"Stopping the learner ({line})")
        raise
    tell(f"The learner ended with code {code}")
    return code


class Servers:
    """All servers of a launch; none is left when this is."""

    def __init__(self, crew: Crew, asked: StopSignals, tell: Tell) -> None:
        self._crew = crew
        self._asked = asked
        self._tell = tell
        self._processes: list[ServerProcess] = []
        self._kept: list[SupervisedServer] = []

    def start(self) -> None:
        """Wait until all are ready; from then on one that ends is started again.

        Raises what `wait_until_ready` raises.
        """
        for start in self._crew.servers:
            self._processes.append(start())
        wait_until_ready(self._processes, self._crew.start_s, self._asked, self._tell)
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
                if self._asked.urgent:
                    for server in running:
                        server.kill()
                time.sleep(_POLL_S)
        for server, stop in zip(running, stops, strict=True):
            if (failure := stop.exception()) is not None:
                with suppress(OSError):
                    self._tell(
                        f"{server.base_url} could not be stopped ({failure!r}): it is killed "
                        "with the end of this"
                    )
