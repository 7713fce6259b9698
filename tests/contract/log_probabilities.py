"""How far learner and engine are apart: runs `tests.contract.engine_logprobs`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from learner.config import dump_mapping, merge
from learner.data.toy import ToyData
from tests.unit.small_run import small_mapping

VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "OMP_NUM_THREADS": "1",
    # As a server's engine: vLLM would choose V2 on a GPU.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def differences(checkpoint: Path, data: ToyData, folder: Path, dtype: str) -> list[float]:
    """Of each token of three answers: how far the two log-probabilities are apart, in nats."""
    small = small_mapping(checkpoint, data, folder / "run")
    mapping = merge(small, {"model": {"torch_dtype": dtype}})
    config, out = folder / "run.yaml", folder / "found.json"
    config.write_text(dump_mapping(mapping))
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.engine_logprobs", str(config), str(out)],
        env=os.environ | VARIABLES,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(out.read_text())
    return [
        abs(ours - theirs)
        for pair in zip(found["learner"], found["engine"], strict=True)
        for ours, theirs in zip(*pair, strict=True)
    ]
