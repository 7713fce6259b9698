"""Names of the logs of answers: `rollouts/step_000012.rank1.jsonl`. Imports no torch.

answers_file()   where process `rank` logs its answers of a step
logged_in()      step and rank of such a file
"""

import re
from pathlib import Path

ROLLOUTS = "rollouts"
_NAME = re.compile(r"step_(\d{6,})(?:\.rank([1-9]\d*))?\.jsonl")


def answers_file(run: Path, step: int, rank: int) -> Path:
    """run: the run folder. step: from 1. rank: of the process that asked."""
    of_rank = f".rank{rank}" if rank else ""
    return run / ROLLOUTS / f"step_{step:06d}{of_rank}.jsonl"


def logged_in(name: str) -> tuple[int, int] | None:
    """Step and rank of the log with this name; None for the name of anything else."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None
