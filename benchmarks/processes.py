"""Processes of a benchmark: started with a log, asked for readiness, stopped with all below.

Nothing outlives the benchmark: `Peer.stop` ends the process and what is below it by their
ids, and a peer ends itself when the benchmark is killed (`end_with_benchmark`).
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rollout_server.runtime.processes import stop_with

START_TIMEOUT_S = 600.0
STOP_GRACE_S = 20.0
LOG_TAIL_LINES = 30


class PeerFailed(Exception):
    """A process of the benchmark ended or never answered; holds the end of its log."""


class Peer:
    """`python -m MODULE ARGS...` with its output in a log file.

    module: or the path of a script. environment: variables it finds besides the benchmark's own.
    piped: talked to in lines, over its standard input and output. folder: where it runs.
    """

    def __init__(
        self,
        module: str,
        args: list[str],
        log: Path,
        environment: dict[str, str],
        piped: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.module, self._log = module, log
        program = [module] if module.endswith(".py") else ["-m", module]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *program, *args],
                cwd=folder,
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

    def wait_until_healthy(self, url: str) -> None:
        """Wait for `url` to say 200. Raises PeerFailed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                if opener.open(url, timeout=5).status == 200:
                    return
            if self._process.poll() is not None:
                raise self.failure(f"ended with code {self._process.returncode}")
            time.sleep(0.5)
        raise self.failure(f"did not answer {url} within {START_TIMEOUT_S:.0f} s")

    def say(self, line: str) -> None:
        _open(self._process.stdin).write(line + "\n")
        _open(self._process.stdin).flush()

    def hear(self) -> str:
        """Its next line. Raises PeerFailed when it has ended."""
        line = _open(self._process.stdout).readline()
        if not line:
            raise self.failure("ended")
        return line

    def ask(self, line: str) -> str:
        """Return its answer to a line. Raises PeerFailed."""
        self.say(line)
        return self.hear()

    def failure(self, found: str) -> PeerFailed:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return PeerFailed(f"{self.module} {found}; the end of its log:\n  " + "\n  ".join(lines))

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever of its tree is left; idempotent."""
        if self._process.poll() is None:
            below = tree(self.pid)[1:]
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_GRACE_S)
            self._process.kill()
            self._process.wait()
            _kill_left(below)


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the peer was started without pipes"
    return pipe


def _kill_left(pids: list[int]) -> None:
    """Give `pids` a second to end with their parent, then kill those that have not."""
    deadline = time.monotonic() + 1.0
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in filter(_runs, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def end_with_benchmark() -> None:
    """In a peer: have the kernel send SIGTERM when the benchmark that started it dies."""
    stop_with(int(os.environ["BENCHMARK_PID"]))


def tree(pid: int) -> list[int]:
    """The process and every process below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = task.read_text().split()
        except OSError:
            continue
        for child in below:
            found += tree(int(child))
    return found


def proportional_kib(pid: int) -> int:
    """Resident memory with a part of each shared page (Pss); 0 when the process has just ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class Holdings:
    """What a process holds: resident KiB, KiB of addresses, open files, threads."""

    resident_kib: int
    virtual_kib: int
    files: int
    threads: int


def holdings(pid: int) -> Holdings:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return Holdings(
        resident_kib=int(status["VmRSS"].split()[0]),
        virtual_kib=int(status["VmSize"].split()[0]),
        files=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=int(status["Threads"]),
    )


def name_of(pid: int) -> str:
    """`VLLM::EngineCore`, `python ...`: what the process calls itself."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    return words.decode(errors="replace").strip()
