"""A rollout server as a child process, owned and stopped by whoever started it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from learner.rollout.client import SERVER_ERRORS, RolloutClient
from shared_contracts.errors import ContractError

LOOPBACK = "127.0.0.1"
# What a server takes to end when it is told to: its `grace_seconds`, and its engines' end.
SERVER_GRACE_S = 10.0
STOP_MARGIN_S = 20.0
_LOG_TAIL_LINES = 15


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports that are free on loopback now."""
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports: list[int] = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class ServerProcess:
    """`rollout-server serve`, with its output at the end of a log file.

    The server ends with the thread that started it, and so with this process, however that
    ends. An interrupt of the terminal does not reach it: it is for whoever started it.

    port: a free one unless given. environment: this process's own unless given.
    host: IPv4 address to listen on. base_url: where it is called; of `host` unless given.
    grace_s: what the server's `grace_seconds` is; a stop leaves it more than that.
    """

    _log_start = 0  # bytes of the log that earlier starts have written
    _grace_s = SERVER_GRACE_S

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Wait for `/health/` to say 200.

        Raises:
            ContractError: the server ended, or was not ready in time; shows its last lines.
        """
        deadline = time.monotonic() + timeout_s
        with RolloutClient(self.base_url, timeout_s) as client:
            while time.monotonic() < deadline:
                try:
                    client.health()
                    return
                except SERVER_ERRORS:
                    if (code := self._process.poll()) is not None:
                        raise self._failure(f"it ended with code {code}") from None
                time.sleep(0.2)
        raise self._failure(f"it was not ready within {timeout_s:.0f} s")

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
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

    def kill(self) -> None:
        """SIGKILL; its engines end with it. Whoever waits for its end goes on."""
        self._process.kill()

    def log_tail(self) -> str:
        """Where the log is, and the last lines of this start."""
        said = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        lines = said.splitlines()[-_LOG_TAIL_LINES:]
        return f"Read {self.log}; its last lines:\n  " + "\n  ".join(lines)

    def _failure(self, found: str) -> ContractError:
        return ContractError(f"the rollout server at {self.base_url}", found, self.log_tail())
