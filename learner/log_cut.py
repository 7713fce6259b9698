"""The logs of a run that was killed, cut back to where it goes on, so that every step is in
them once.

A checkpoint holds how long each log was when it was made; what a killed run wrote after it
is cut off, and written again by the steps that are made again.
"""

import os
import re
import shutil
from pathlib import Path

LOGS = ("metrics.jsonl", "rollout_calls*.jsonl")
ROLLOUTS = "rollouts"
EVALUATIONS = "evaluations"
_OF_STEP = re.compile(r"step_(\d+)\b.*")
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
        of = step_of(path.name)
        if of is not None and of > step:
            path.unlink()
    for path in (folder / EVALUATIONS).glob("step_*"):
        after = _EVALUATION.fullmatch(path.name)
        if after is not None and int(after[1]) > step:
            shutil.rmtree(path)


def step_of(name: str) -> int | None:
    """The step that a file of `rollouts/` is of; None for another name."""
    match = _OF_STEP.fullmatch(name)
    return int(match[1]) if match else None


def _logs(folder: Path) -> list[Path]:
    return sorted(path for pattern in LOGS for path in folder.glob(pattern))
