"""The demo and the commands against their limits, in one run.

    .venv/bin/python benchmarks/demo.py [--runs N] [--without-demo]

Prints the table of docs/benchmarks.md: each figure as a share of its limit. Memory is the
sum of the proportional set sizes of the demo and all processes below it, sampled twice a
second, so that shared pages count once.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
DEMO_LIMIT_S = 600.0
MEMORY_LIMIT_GIB = 8.0
HELP_LIMIT_S = 0.5
F1_GOAL = 0.6


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
    """Pss of one process; 0 when it has just ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return int(re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[1])  # type: ignore[index]


def run_demo() -> tuple[float, float, float]:
    """(seconds, peak GiB, last F1) of one `learner demo`."""
    with tempfile.TemporaryDirectory() as folder:
        started, peak = time.monotonic(), 0
        output = Path(folder) / "printed.txt"
        with output.open("w") as file:
            demo = subprocess.Popen(
                [str(BIN / "learner"), "demo", "--out", f"{folder}/demo"], stdout=file
            )
            while demo.poll() is None:
                peak = max(peak, sum(proportional_kib(pid) for pid in tree(demo.pid)))
                time.sleep(0.5)
        seconds = time.monotonic() - started
        if demo.returncode:
            sys.exit(f"the demo ended with code {demo.returncode}")
        scores = re.findall(r"│ after both.*?│ (\d\.\d+)", output.read_text())
        return seconds, peak / 2**20, float(scores[-1])


def help_seconds(command: str) -> float:
    started = time.monotonic()
    subprocess.run([str(BIN / command), "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - started


def row(name: str, values: list[float], limit: float, unit: str) -> str:
    ratios = [value / limit for value in values]
    spread = f"{min(ratios):.2f} .. {max(ratios):.2f}"
    middle = statistics.median(values)
    return (
        f"| {name} | {middle:.2f} {unit} | {limit:g} {unit} | {statistics.median(ratios):.2f} "
        f"| {spread} | {len(values)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="demos to run")
    parser.add_argument("--without-demo", action="store_true")
    options = parser.parse_args()
    lines = [
        "| what | median | limit or goal | ratio | spread | runs |",
        "|---|---|---|---|---|---|",
    ]
    for command in ("learner", "rollout-server"):
        values = [help_seconds(command) for _ in range(10)]
        lines.append(row(f"`{command} --help`", values, HELP_LIMIT_S, "s"))
    if not options.without_demo:
        seconds, memory, scores = zip(*(run_demo() for _ in range(options.runs)), strict=True)
        lines.append(row("`learner demo`, wall time", list(seconds), DEMO_LIMIT_S, "s"))
        lines.append(row("`learner demo`, peak memory", list(memory), MEMORY_LIMIT_GIB, "GiB"))
        lines.append(
            row("`learner demo`, F1 at the end (higher is better)", list(scores), F1_GOAL, "")
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
