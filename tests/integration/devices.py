"""Two learner processes that say which device each of them takes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def devices_of_two(folder: Path, **environment: str) -> list[dict[str, Any]]:
    """What `tests.integration.device_process` found, by rank; environment: over this one's."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", "-m", "tests.integration.device_process", str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
