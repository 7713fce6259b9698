"""Runs of several learner processes that a test starts, kills and starts again."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.contract.running_server import is_alive

# Limits that only a failing test reaches: for the rest of a run whose process died, for a run.
END_S = 120.0
RUN_S = 240.0


class Ranks:
    """The processes of one run. pids: by rank."""

    def __init__(self, pids: list[int], ends: "queue.Queue[dict[str, int]]", logs: list[Path]):
        self.pids = pids
        self._ends = ends
        self._logs = logs
        self._codes: dict[int, int] = {}

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, timeout_s: float = END_S) -> list[int]:
        """Exit code of each rank; minus the signal of one that was killed."""
        while len(self._codes) < len(self.pids):
            try:
                end = self._ends.get(timeout=timeout_s)
            except queue.Empty:
                raise AssertionError(f"after {timeout_s:g} s:\n{self.tails()}") from None
            self._codes[end["pid"]] = end["code"]
        assert not any(map(is_alive, self.pids))
        return [self._codes[pid] for pid in self.pids]

    def running(self) -> bool:
        return all(map(is_alive, self.pids))

    def log(self, rank: int) -> str:
        return self._logs[rank].read_text()

    def tails(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in self._logs)


class Nursery:
    """Starts runs, one at a time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ends: queue.Queue[dict[str, int]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, config: Path, ranks: int, moment: Sequence[str | float] = ()) -> Ranks:
        """`learner train`. moment: of its end, as `rank_nursery` reads it."""
        words = ["train", "--config", str(config)]
        return self._start(words, config.parent, ranks, config.stem, moment)

    def run(self, words: Sequence[str], folder: Path) -> tuple[int, str]:
        """Exit code and output of `learner` with these words, in the folder."""
        alone = self._start(words, folder, 1, "learner", ())
        (code,) = alone.wait(RUN_S)
        return code, alone.log(0)

    def _start(
        self,
        words: Sequence[str],
        folder: Path,
        ranks: int,
        name: str,
        moment: Sequence[str | float],
    ) -> Ranks:
        assert self._process.stdin is not None
        logs = [folder / f"{name}.{rank}.log" for rank in range(ranks)]
        for log in logs:
            log.unlink(missing_ok=True)
        wanted = {
            "words": words,
            "folder": str(folder),
            "ranks": ranks,
            "log": str(folder / name),
            "moment": moment,
        }
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        pids = self._lines.get(timeout=RUN_S)["pids"]
        return Ranks(pids, self._ends, logs)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            (self._lines if "pids" in message else self._ends).put(message)


@contextmanager
def nursery(folder: Path) -> Iterator[Nursery]:
    """At the end, kills every process that it has started."""
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "nursery.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.rank_nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | own,
        )
    try:
        yield Nursery(process)
    finally:
        process.kill()
        process.wait()


def wait_until(holds: Callable[[], bool], ranks: Ranks) -> None:
    """Until `holds` is true. The processes must run until then."""
    pause = threading.Event()
    while not holds():
        assert ranks.running(), ranks.tails()
        pause.wait(0.005)
