"""A million cases for the strict parser, none of which may raise or break a property.

    .venv/bin/python -m benchmarks.reliability.parser [--seeds N] [--runs N] [--jobs N]
        [--without-hypothesis]

Bytes that follow the coverage of the parser (`tests/fuzz/parser.py`, atheris), each seed from a
corpus of its own, then the properties of `tests/unit/test_parsing_properties.py` with 20,000 new
examples each. Prints the table of docs/reliability.md; ends with code 1 when a case failed.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUZZ_TARGET = ROOT / "tests/fuzz/parser.py"
PROPERTIES = ROOT / "tests/unit/test_parsing_properties.py"
SHOWN_LINES = 30

_DONE = re.compile(r"^Done (\d+) runs in", re.MULTILINE)
_COVERAGE = re.compile(r"DONE\s+cov: (\d+) ft: (\d+) corp: (\d+)")
_EXAMPLES = re.compile(r"(\d+) passing examples, (\d+) failing examples")


@dataclass(frozen=True)
class Part:
    """cases: that were run; failed: those which raised, or broke a property."""

    name: str
    cases: int
    failed: int
    seconds: float
    detail: str

    @property
    def row(self) -> str:
        rate = self.cases / self.seconds
        return (
            f"| {self.name} | {self.cases:,} | {self.failed} | {self.seconds:.0f} s "
            f"| {rate:.0f} | {self.detail} |"
        )


def fuzz(seed: int, runs: int) -> Part:
    """One run of libFuzzer, which ends at the first input that fails."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"-runs={runs}", f"-seed={seed}", f"-artifact_prefix={folder}/"]
        _, said, seconds = _run([str(FUZZ_TARGET), *options])
    done, coverage = _DONE.search(said), _COVERAGE.search(said)
    if done is None or coverage is None:
        print("\n".join(said.splitlines()[-SHOWN_LINES:]), file=sys.stderr)
        return Part(f"atheris, seed {seed}", 0, 1, seconds, "see above")
    edges, features, inputs = coverage.groups()
    detail = f"{edges} edges and {features} features reached, by {inputs} inputs"
    return Part(f"atheris, seed {seed}", int(done[1]), 0, seconds, detail)


def try_properties() -> Part:
    options = ["--hypothesis-profile=nightly", "--hypothesis-show-statistics", "--timeout=0"]
    code, said, seconds = _run(
        ["-m", "pytest", "-q", "-m", "hypothesis", *options, str(PROPERTIES)]
    )
    counts = [(int(passed), int(failed)) for passed, failed in _EXAMPLES.findall(said)]
    failed = sum(failed for _, failed in counts)
    if code or not counts:
        print(said, file=sys.stderr)
        failed = max(failed, 1)
    detail = said.strip().splitlines()[-1].strip("= ")
    return Part("hypothesis", sum(passed for passed, _ in counts), failed, seconds, detail)


def _run(command: list[str]) -> tuple[int, str, float]:
    """Exit code of a program of this Python, what it said, and how long it took."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=200_000, help="of each seed")
    parser.add_argument("--jobs", type=int, default=1, help="seeds that run at the same time")
    parser.add_argument("--without-hypothesis", action="store_true")
    options = parser.parse_args()
    print("| what | cases | failed | time | a second | detail |\n|---|---|---|---|---|---|")
    parts: list[Part] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(fuzz, seed, options.runs) for seed in range(1, options.seeds + 1)]
        if not options.without_hypothesis:
            runs.append(pool.submit(try_properties))
        for run in as_completed(runs):
            parts.append(run.result())
            print(parts[-1].row, flush=True)
    print(f"\n{sum(part.cases for part in parts):,} cases")
    sys.exit(any(part.failed for part in parts))


if __name__ == "__main__":
    main()
