"""The demo and the commands against their limits, in one run.

    .venv/bin/python -m benchmarks.demo [--only NAME ...] [--rounds N] [--out FILE.json]

help   how long `learner --help` and `rollout-server --help` take
demo   wall time, peak memory and last F1 of `learner demo`, some minutes a round

Memory is the sum of the proportional set sizes of the demo and of all processes below it, sampled
twice a second, so that shared pages count once. Prints the table of docs/evidence.md.
"""

import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.command import Bench, run
from benchmarks.processes import PeerFailed, tree
from benchmarks.results import Result, median_of

BIN = Path(sys.executable).parent
DEMO_LIMIT_S = 600.0
MEMORY_LIMIT_GIB = 8.0
HELP_LIMIT_S = 0.5
F1_GOAL = 0.6


class Demo(NamedTuple):
    """One `learner demo`."""

    seconds: float
    peak_gib: float
    f1: float


def run_demo() -> Demo:
    """Raises PeerFailed."""
    with tempfile.TemporaryDirectory() as folder:
        started, peak = time.monotonic(), 0
        output = Path(folder) / "printed.txt"
        with (
            output.open("w") as file,
            subprocess.Popen(
                [str(BIN / "learner"), "demo", "--out", f"{folder}/demo"], stdout=file
            ) as demo,
        ):
            while demo.poll() is None:
                peak = max(peak, proportional_bytes(demo.pid))
                time.sleep(0.5)
        seconds = time.monotonic() - started
        if demo.returncode:
            raise PeerFailed(f"the demo ended with code {demo.returncode}")
        scores = re.findall(r"│ after both.*?│ (\d\.\d+)", output.read_text())
        return Demo(seconds, peak / 2**30, float(scores[-1]))


def proportional_bytes(root: int) -> int:
    """Resident memory of a tree of processes, with a part of each shared page (Pss)."""
    total = 0
    with suppress(psutil.Error):  # a process has just ended
        for process in tree(root):
            total += process.memory_full_info().pss
    return total


def help_seconds(command: str) -> float:
    started = time.monotonic()
    subprocess.run([str(BIN / command), "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - started


def helps(bench: Bench) -> list[Result]:
    return [
        median_of(
            f"`{command} --help`",
            [help_seconds(command) for _ in range(bench.rounds)],
            HELP_LIMIT_S,
            at_least=False,
            unit=" s",
        )
        for command in ("learner", "rollout-server")
    ]


def demos(bench: Bench) -> list[Result]:
    runs = [run_demo() for _ in range(bench.rounds)]
    name = "`learner demo`"
    seconds, peaks, scores = zip(*runs, strict=True)
    return [
        median_of(f"{name}, wall time", seconds, DEMO_LIMIT_S, at_least=False, unit=" s"),
        median_of(f"{name}, peak memory", peaks, MEMORY_LIMIT_GIB, at_least=False, unit=" GiB"),
        median_of(f"{name}, F1 at the end", scores, F1_GOAL, at_least=True),
    ]


if __name__ == "__main__":
    run("demo", __doc__, {"help": helps, "demo": demos}, rounds=5, errors=(PeerFailed,))
