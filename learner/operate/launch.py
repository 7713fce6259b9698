"""Servers and learner of one machine, started one after the other and stopped together (DEP-02).

    servers start -> all are ready -> the learner trains
        -> it ends, a server ends for good, or a signal comes
        -> the learner is stopped, then the servers

Whatever becomes of this process, nothing that it has started is left: the kernel ends them
with it.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from learner.operate.kept_server import PAUSES_S, KeptServer
from learner.operate.launch_plan import LaunchPlan, ServerPlan
from learner.operate.learner_process import LearnerProcess
from learner.operate.readiness import wait_until_ready
from learner.operate.server_process import ServerProcess
from learner.operate.stop_signals import StopAsked, StopSignals
from shared_contracts.errors import RunError

# Imports, weights, and on GPUs the capture of graphs.
START_S = 900.0
_POLL_S = 0.2

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Crew:
    """What is started. servers: each on a port of its own. learner: hears of second signals.

    start_s, pauses_s: see `KeptServer`.
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
        self._kept: list[KeptServer] = []

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
            self._kept.append(KeptServer(start, start_s, pauses_s, first=process, name=name))

    def check(self) -> None:
        """Raises RunError once a server ended too often."""
        for server in self._kept:
            server.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """SIGTERM to all at once, SIGKILL after a grace time or with a second signal."""
        with suppress(OSError):
            self._tell("Stopping the servers")
        running: Sequence[KeptServer | ServerProcess] = self._kept or self._processes
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
