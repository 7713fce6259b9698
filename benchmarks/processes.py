"""Processes of a benchmark: started with a log, asked for readiness, stopped with all below.

Nothing outlives the benchmark: `Peer.stop` ends the process and what is below it by their
ids, and a peer ends itself when the benchmark is killed (`end_with_benchmark`).
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Self

import httpx
import psutil

from rollout_server.runtime.processes import stop_with

START_TIMEOUT_S = 600.0
STOP_GRACE_S = 20.0
LOG_TAIL_LINES = 30


class PeerFailed(Exception):
    """A process of the benchmark ended or never answered; holds the end of its log."""


class Peer:
    """`python -m MODULE ARGS...` with its output in a log file.

    environment: variables it finds besides the benchmark's own.
    piped: called in lines, over its standard input and output.
    """

    def __init__(
        self,
        module: str,
        args: list[str],
        log: Path,
        environment: dict[str, str],
        piped: bool = False,
    ) -> None:
        self.module, self._log = module, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *args],
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
                text=True,
                # Ctrl-C reaches the benchmark alone, which then stops its peers in order.
                start_new_session=True,
                env=os.environ | environment | {"BENCHMARK_PID": str(os.getpid())},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_healthy(self, url: str) -> None:
        """Wait for `url` to answer 200. Raises PeerFailed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                    return
            if self._process.poll() is not None:
                raise self._failure(f"ended with code {self._process.returncode}")
            time.sleep(0.5)
        raise self._failure(f"did not answer {url} within {START_TIMEOUT_S:.0f} s")

    def read_line(self) -> str:
        """Raises PeerFailed when the process has ended."""
        line = _open(self._process.stdout).readline()
        if not line:
            raise self._failure("ended")
        return line

    def ask(self, line: str) -> str:
        """Return its answer to a line. Raises PeerFailed."""
        _open(self._process.stdin).write(line + "\n")
        _open(self._process.stdin).flush()
        return self.read_line()

    def _failure(self, found: str) -> PeerFailed:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return PeerFailed(f"{self.module} {found}; the end of its log:\n  " + "\n  ".join(lines))

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever of its tree is left; idempotent."""
        if self._process.poll() is None:
            below = tree(self.pid)[1:]
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_GRACE_S)
            self._process.kill()
            self._process.wait()
            for left in psutil.wait_procs(below, timeout=1.0)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the peer was started without pipes"
    return pipe


def end_with_benchmark() -> None:
    """In a peer: have the kernel send SIGTERM when the benchmark that started it dies."""
    stop_with(int(os.environ["BENCHMARK_PID"]))


def tree(pid: int) -> list[psutil.Process]:
    """The process and every process below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]
