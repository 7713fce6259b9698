"""A rollout server as a child process; `SupervisedServer` restarts it (ROLL-03, DEP-02)."""

import logging
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from learner.rollout.client import CLOCK, SERVER_ERRORS, RolloutClient
from shared_contracts.errors import ContractError, RunError

_LOG = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
# A server ends within its `grace_seconds` after SIGTERM, and its engines within this margin.
SERVER_GRACE_S = 10.0
STOP_MARGIN_S = 20.0
_LOG_TAIL_LINES = 15
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000
_RANDOM = random.SystemRandom()  # processes with the same seed take different ports

# Seconds before each restart; a server that ends after the last one is given up.
PAUSES_S = (1.0, 2.0, 10.0, 30.0, 60.0)
# A server that was healthy for so long has all restarts again.
STEADY_S = 300.0


def free_ports(count: int) -> list[int]:
    """Return distinct TCP ports that are free on loopback now.

    They lie below the kernel's ephemeral ports, of which any connection may take one later. If
    there is no room below, the kernel chooses.
    """
    low = int(_EPHEMERAL_PORTS.read_text().split()[0])
    candidates = range(_FIRST_PORT, low) if low >= _FIRST_PORT + 1_000 else range(1)
    ports: set[int] = set()
    while len(ports) < count:
        with suppress(OSError), socket.create_server((LOOPBACK, _RANDOM.choice(candidates))) as one:
            ports.add(one.getsockname()[1])
    return list(ports)


class ServerProcess:
    """`rollout-server serve`, with its output at the end of a log file.

    The server ends with the thread that started it, and so with this process. An interrupt of the
    terminal does not reach it.

    host: IPv4 address to listen on. base_url: where it is called; of `host` unless given.
    """

    _log_start = 0  # bytes of the log before this start
    _grace_s = SERVER_GRACE_S  # of a stand-in that starts another program

    def __init__(
        self,
        options: list[str],
        log: Path,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        host: str = LOOPBACK,
        base_url: str | None = None,
        grace_s: float = SERVER_GRACE_S,
    ) -> None:
        self._grace_s = grace_s
        port = port or free_ports(1)[0]
        self.base_url = base_url or f"http://{host}:{port}"
        self.log = log
        command = [sys.executable, "-m", "rollout_server", "serve"]
        address = ["--host", host, "--port", str(port)]
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [*command, *address, "--parent-pid", str(os.getpid()), *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Wait for `/health/`. Raises ContractError, with the last lines, if it ends or is late."""
        client = RolloutClient(self.base_url, timeout_s)
        for waited_s in CLOCK.attempts(longest_pause_s=0.2):
            try:
                client.health()
                return
            except SERVER_ERRORS as error:
                if waited_s > timeout_s:
                    found = f"it was not ready within {timeout_s:.0f} s ({error})"
                    raise self.failure(found) from error
            if (code := self._process.poll()) is not None:
                raise self.failure(f"it ended with code {code}")

    def code(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after a grace time; idempotent."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._grace_s + STOP_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_tail(self) -> str:
        """Return the path of the log, and its last lines since this start."""
        text = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        lines = text.splitlines()[-_LOG_TAIL_LINES:]
        return f"Read {self.log}; its last lines:\n  " + "\n  ".join(lines)

    def failure(self, found: str) -> ContractError:
        return ContractError(f"the rollout server at {self.base_url}", found, self.log_tail())


class SupervisedServer:
    """A server process that is restarted until `stop`.

    start: starts the process, each time on the same port. start_timeout_s: longest wait for it.
    clock: measures how long a start was healthy, in seconds.
    first: a process that was started already, and is healthy.
    """

    def __init__(
        self,
        start: Callable[[], ServerProcess],
        start_timeout_s: float,
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
        first: ServerProcess | None = None,
    ) -> None:
        """Wait until the first start is healthy, unless it is given.

        Raises ContractError as `wait_until_healthy`; nothing is left running.
        """
        self._start = start
        self._start_timeout_s = start_timeout_s
        self._pauses_s = pauses_s
        self._clock = clock
        self._stopped = threading.Event()
        self._starting = threading.Lock()  # a start, or the end of all starts
        self._given_up: RunError | None = None
        self._process = first or start()
        self._name = f"the rollout server at {self._process.base_url}"
        if first is None:
            try:
                self._process.wait_until_healthy(start_timeout_s)
            except BaseException:
                self._process.stop()
                raise
        self._ready_since = clock()  # infinite until the newest start is healthy
        # The kernel ends a child with the thread that started it: this one waits for it.
        threading.Thread(target=self._supervise, daemon=True).start()

    @property
    def base_url(self) -> str:
        return self._process.base_url

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise RunError if the server ended too often, or could not be restarted."""
        if self._given_up is not None:
            raise self._given_up

    def stop(self) -> None:
        with self._starting:
            self._stopped.set()
        self._process.stop()

    def _supervise(self) -> None:
        """Restart the process after each end, until it is stopped or ended too often in a row."""
        ends = 0
        while not self._stopped.is_set():
            code = self._process.wait()
            ends = 1 if self._clock() - self._ready_since >= STEADY_S else ends + 1
            self._ready_since = math.inf
            if self._stopped.is_set():
                break
            if ends > len(self._pauses_s):
                times = f"ended {ends} times, the last time with code {code}"
                self._given_up = RunError(f"{self._name} {times}. {self._process.log_tail()}")
                break
            pause_s = self._pauses_s[ends - 1]
            _LOG.warning("%s ended with code %d; restart in %g s", self._name, code, pause_s)
            self._stopped.wait(pause_s)
            try:
                self._restart()
            except OSError as error:
                reason = f"{self._name} ended and could not be restarted: {error}"
                self._given_up = RunError(reason)
                break

    def _restart(self) -> None:
        with self._starting:
            if self._stopped.is_set():
                return
            self._process = self._start()
        with suppress(ContractError):
            self._process.wait_until_healthy(self._start_timeout_s)
            self._ready_since = self._clock()
