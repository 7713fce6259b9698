"""Loading and checking every shipped training YAML, against parsing alone.

    ours    load_config: YAML, `extends`, retired keys, types, agreement of keys
    theirs  yaml.safe_load of the same files, each read once more for every file that extends it

The import of the package is timed in fresh interpreters and told beside the figure: a command
pays it once, however many files it reads.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import yaml

from benchmarks.results import Result, median_of
from learner.config import load_config
from learner.config.yaml12 import read_mapping
from shared_contracts.extends import read_chain

CONFIGS = Path(__file__).parents[2] / "configs"
GOAL_SECONDS = 1.0
GOAL_RATIO = 2.0
_IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def measure(rounds: int) -> list[Result]:
    """Seconds for all shipped configs, and how often that is the time of parsing them."""
    paths = sorted(CONFIGS.rglob("*.yaml"))
    files = [file for path in paths for file in read_chain(path, read_mapping)[0]]
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(_seconds(lambda: [load_config(path) for path in paths]))
        theirs.append(_seconds(lambda: [yaml.safe_load(file.read_bytes()) for file in files]))
    imports = [_import_seconds("learner.config") for _ in range(rounds)]
    detail = f"{len(paths)} files, {len(files)} with bases; the import once, before: "
    detail += f"{statistics.median(imports):.2f} s"
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    peer = f"PyYAML's safe_load: {1000 * statistics.median(theirs):.0f} ms"
    return [
        median_of("load and check every shipped config", ours, GOAL_SECONDS, False, " s", detail),
        median_of("the same, against parsing alone", ratios, GOAL_RATIO, False, "x", peer),
    ]


def _seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def _import_seconds(module: str) -> float:
    """Of the first import of a module, in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT.format(module)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)
