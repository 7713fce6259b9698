"""The learner as a child process: torchrun and what it starts, stopped as one."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from learner.operate.stop_signals import StopSignals
from learner.operate.torchrun import SHUTDOWN_S
from shared_contracts.cli import RUN_FAILED

# torchrun kills what does not end in its own time.
STOP_GRACE_S = SHUTDOWN_S + 10.0
_POLL_S = 0.05


class LearnerProcess:
    """`command` in so many processes, with this process's output; all end with this process.

    In a session of their own, so that an interrupt of the terminal is this process's alone to
    act on. asked: a second signal cuts the grace of a stop short.
    """

    def __init__(
        self,
        command: list[str],
        processes: int,
        environment: Mapping[str, str],
        asked: StopSignals,
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            time.sleep(_POLL_S)
        self._process.kill()  # and the kernel kills its processes
        self._process.wait()
