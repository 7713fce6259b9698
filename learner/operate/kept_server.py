"""A rollout server of the learner's own, which is started again when it dies (ROLL-03)."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

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
    starts: how often it was started.
    """

    def __init__(
        self,
        start: Callable[[], ServerProcess],
        start_timeout_s: float,
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wait for the first start.

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
        self._process = start()
        try:
            self._process.wait_until_healthy(start_timeout_s)
        except BaseException:
            self._process.stop()
            raise
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
                self._ready_since, self._ready = self._clock(), process

    def stop(self) -> None:
        """End the process and what keeps it; idempotent."""
        with self._changing:
            self._stopped.set()
        self._process.stop()

    def _keep(self) -> None:
        try:
            self._keep_running()
        except OSError as error:
            self._given_up = RunError(
                f"the colocated rollout server ended and could not be started again: {error}"
            )

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
                    f"the colocated rollout server ended {ends} times, the last time with code "
                    f"{code}. {self._process.log_tail()}"
                )
                return
            pause_s = self._pauses_s[ends - 1]
            _LOG.warning(
                "the colocated rollout server ended with code %d and is started again in %g s",
                code,
                pause_s,
            )
            if self._stopped.wait(pause_s) or not self._start_again():
                return

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
