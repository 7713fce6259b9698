"""The logs of a run that was killed, cut back to where it goes on, so that every step is in
them once.

A checkpoint holds how long each log was when it was made; what a killed run wrote after it
is cut off, and written again by the steps that are made again.
"""

import os
import re
import shutil
from pathlib import Path

from learner.answer_files import ROLLOUTS, logged_in

LOGS = ("metrics.jsonl", "rollout_calls*.jsonl")
EVALUATIONS = "evaluations"
_EVALUATION = re.compile(r"step_(\d+)(\.part)?")


def log_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each log of a run folder, by name."""
    return {path.name: path.stat().st_size for path in _logs(folder)}


def cut_back(folder: Path, sizes: dict[str, int], step: int) -> None:
    """Cut each log to its size, and remove those without one; drop the rollouts and evaluations
    of steps after `step`.

    sizes: what `log_sizes` said after step `step`. May be called again when it was killed.
    """
    for path in _logs(folder):
        if path.name not in sizes:
            path.unlink()
        elif path.stat().st_size > sizes[path.name]:
            os.truncate(path, sizes[path.name])
    for path in (folder / ROLLOUTS).glob("step_*"):
        logged = logged_in(path.name.removesuffix(".part"))
        if logged is not None and logged[0] > step:
            path.unlink()
    for path in (folder / EVALUATIONS).glob("step_*"):
        after = _EVALUATION.fullmatch(path.name)
        if after is not None and int(after[1]) > step:
            shutil.rmtree(path)


def _logs(folder: Path) -> list[Path]:
    return sorted(path for pattern in LOGS for path in folder.glob(pattern))
