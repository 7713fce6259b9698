"""A rollout server as a child process, which is started again when it dies (ROLL-03, DEP-02)."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from learner.operate.server_process import ServerProcess
from shared_contracts.errors import ContractError, RunError

_LOG = logging.getLogger(__name__)

# Seconds before each new start; after the last one a server that dies stays dead.
PAUSES_S = (1.0, 2.0, 10.0, 30.0, 60.0)
# Seconds of service after which a server that dies is started as if for the first time.
STEADY_S = 300.0
_POLL_S = 0.1


class KeptServer:
    """Keeps one process running until `stop`; who calls it sees a server that restarts.

    start: starts the process, each time on the same port.
    clock: seconds; tells how long a start served.
    first: started already, and healthy. name: in messages.
    starts: how often it was started.
    """

    def __init__(
        self,
        start: Callable[[], ServerProcess],
        start_timeout_s: float,
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
        first: ServerProcess | None = None,
        name: str = "the colocated rollout server",
    ) -> None:
        """Wait for the first start, unless it is given.

        Raises:
            ContractError: it ended, or was not ready in time; nothing is left running.
        """
        self.starts = 1
        self._start = start
        self._start_timeout_s = start_timeout_s
        self._pauses_s = pauses_s
        self._clock = clock
        self._stopped = threading.Event()
        self._changing = threading.Lock()
        self._given_up: RunError | None = None
        self._name = name
        self._process = first or start()
        if first is None:
            self._wait_for_the_first()
        self._ready_since, self._ready = clock(), self._process
        # The kernel ends a child with the thread that started it: this one waits for it.
        threading.Thread(target=self._keep, daemon=True).start()

    @property
    def base_url(self) -> str:
        return self._process.base_url

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises RunError when the server died too often, or could not be started again."""
        if self._given_up is not None:
            raise self._given_up

    def await_ready(self) -> None:
        """Wait until the newest start is healthy; nothing when it was seen to be.

        Raises:
            RunError: as `check`, or it was not ready in time.
        """
        deadline = time.monotonic() + self._start_timeout_s
        while (process := self._process) is not self._ready:
            self.check()
            try:
                process.wait_until_healthy(max(0.0, deadline - time.monotonic()))
            except ContractError as error:
                if time.monotonic() > deadline:
                    raise RunError(str(error)) from error
                time.sleep(_POLL_S)  # it ended: the next start comes
            else:
                self._mark_ready(process)

    def stop(self) -> None:
        """End the process and what keeps it; idempotent."""
        with self._changing:
            self._stopped.set()
        self._process.stop()

    def kill(self) -> None:
        """Have a `stop` that waits elsewhere end at once."""
        with self._changing:
            self._stopped.set()
        self._process.kill()

    def _wait_for_the_first(self) -> None:
        try:
            self._process.wait_until_healthy(self._start_timeout_s)
        except BaseException:
            self._process.stop()
            raise

    def _keep(self) -> None:
        try:
            self._keep_running()
        except OSError as error:
            self._given_up = RunError(f"{self._name} ended and could not be started again: {error}")

    def _keep_running(self) -> None:
        """Start it again after each end, until it is stopped or ended too often in a row."""
        ends = 0
        while True:
            code = self._process.wait()
            if self._stopped.is_set():
                return
            ends = 1 if self._was_steady() else ends + 1
            if ends > len(self._pauses_s):
                self._given_up = RunError(
                    f"{self._name} ended {ends} times, the last time with code {code}. "
                    f"{self._process.log_tail()}"
                )
                return
            pause_s = self._pauses_s[ends - 1]
            _LOG.warning(
                "%s ended with code %d and is started again in %g s", self._name, code, pause_s
            )
            if self._stopped.wait(pause_s) or not self._start_again():
                return
            with suppress(ContractError):  # it ended, or takes longer: its end is waited for
                self._process.wait_until_healthy(self._start_timeout_s)
                self._mark_ready(self._process)

    def _mark_ready(self, process: ServerProcess) -> None:
        """Note since when it is ready: when it was first seen to be."""
        with self._changing:
            if self._ready is not process:
                self._ready_since, self._ready = self._clock(), process

    def _was_steady(self) -> bool:
        """Whether the newest start was seen to be healthy long before now."""
        return self._ready is self._process and self._clock() - self._ready_since >= STEADY_S

    def _start_again(self) -> bool:
        with self._changing:
            if self._stopped.is_set():
                return False
            self._process = self._start()
            self.starts += 1
            return True
